"""Exactly the traceback that ended a program is found among its other output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.agent.failures.failure import final_traceback

FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'


def stderr_of(program: str) -> str:
    """Return the output of Python when a program dies of an exception."""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    return ran.stderr


@pytest.mark.parametrize(
    ("program", "exception", "first_line"),
    [
        ("raise ValueError('bad')", "ValueError: bad", "Traceback (most recent call last):"),
        ("assert 0", "AssertionError", "Traceback (most recent call last):"),
        (
            "import nothing_here",
            "ModuleNotFoundError: No module named 'nothing_here'",
            "Traceback (most recent",
        ),
        ("raise ValueError('one\\ntwo')", "ValueError: one", "Traceback (most recent call last):"),
        (
            "raise ExceptionGroup('several', [ValueError('a'), KeyError('b')])",
            "ExceptionGroup: several (2 sub-exceptions)",
            "  + Exception Group Traceback (most recent call last):",
        ),
    ],
)
def test_a_traceback_of_python_is_found_complete(program: str, exception: str, first_line: str) -> None:
    """Each kind of uncaught exception has its line, and the block exactly as Python wrote it."""
    text = stderr_of(program)
    found = final_traceback("a log line\n\n" + text + "\n", at_end=True)
    assert found is not None
    assert found[0] == exception
    assert found[1] == text.rstrip("\n")
    assert found[1].startswith(first_line)


@pytest.mark.parametrize(
    ("script", "exception"),
    [
        ("def f(:\n  pass\n", "SyntaxError: invalid syntax"),
        ("if 1:\npass\n", "IndentationError: expected an indented block after 'if' statement on line 1"),
        ("x = '\\d'\ndef f(:\n", "SyntaxError: invalid syntax"),  # a warning that shows its line comes first
    ],
)
def test_a_script_that_python_cannot_compile(tmp_path: Path, script: str, exception: str) -> None:
    """Its report has no header; a traceback that was logged before it is another one."""
    file = tmp_path / "train.py"
    file.write_text(script)
    ran = subprocess.run([sys.executable, "-W", "always", file], capture_output=True, text=True, check=False)
    block = ran.stderr[ran.stderr.index("  File ") :].rstrip("\n")
    for earlier in ("", "a log line\n\n", f"{FRAMES}OSError: logged and forgotten\n"):
        assert final_traceback(earlier + ran.stderr, at_end=True) == (exception, block)


def test_an_import_that_python_cannot_compile(tmp_path: Path) -> None:
    """This report has a header and frames, and they are kept."""
    (tmp_path / "broken.py").write_text("def f(:\n")
    text = stderr_of(f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import broken")
    assert final_traceback(text, at_end=True) == ("SyntaxError: invalid syntax", text.rstrip("\n"))


def test_a_message_that_quotes_a_file_is_no_syntax_error() -> None:
    """Some compilers quote lines of the program below their own error."""
    text = f'{FRAMES}RuntimeError: no such operator\n  File "model.py", line 5\n    f(x)\n    ~ <--- HERE\n'
    assert final_traceback(text, at_end=True) == ("RuntimeError: no such operator", text.rstrip("\n"))


def test_a_chain_is_kept_together() -> None:
    """The exception that was being handled is included, the one logged earlier is not."""
    chained = stderr_of("try: 1 / 0\nexcept ZeroDivisionError as e: raise ValueError('bad') from e")
    during = stderr_of("try:\n try: 1 / 0\n except Exception: {}['k']\nexcept Exception: [][1]")
    for text, message in ((chained, "ValueError: bad"), (during, "IndexError: list index out of range")):
        found = final_traceback(f"{FRAMES}OSError: logged and forgotten\nlog\n{text}", at_end=True)
        assert found == (message, text.rstrip("\n"))


def test_the_last_of_several_counts() -> None:
    """Of unrelated tracebacks the last is the one that ended the program."""
    found = final_traceback(f"{FRAMES}OSError: first\nlog line\n{FRAMES}ValueError: last\n", at_end=True)
    assert found == ("ValueError: last", f"{FRAMES}ValueError: last")


def test_torch_rank_prefixes_are_taken_off() -> None:
    """torch.distributed writes the rank before every line."""
    text = "".join(f"[rank3]: {line}\n" for line in f"{FRAMES}ValueError: bad".splitlines())
    assert final_traceback(text, at_end=True) == ("ValueError: bad", f"{FRAMES}ValueError: bad")


def test_output_after_the_traceback_is_left_out() -> None:
    """Output of exit handlers after an empty line is left out; further lines of the exception are kept."""
    text = f"{FRAMES}RuntimeError: CUDA error\nCompile with X\n\nwandb: synced\n"
    assert final_traceback(text, at_end=True) == (
        "RuntimeError: CUDA error",
        f"{FRAMES}RuntimeError: CUDA error\nCompile with X",
    )


def test_an_old_traceback_counts_only_for_an_exception() -> None:
    """A traceback logged long before is no reason for a kill, but may be one for exit code 1."""
    text = f"{FRAMES}OSError: retried\n" + "step\n" * 100
    assert final_traceback(text, at_end=True) is None
    found = final_traceback(f"{FRAMES}OSError: retried\n\n" + "step\n" * 100, at_end=False)
    assert found == ("OSError: retried", f"{FRAMES}OSError: retried")


def test_faulthandlers_dump_is_found() -> None:
    """For a crash in native code it has the line of the fatal error and the stacks."""
    program = "import faulthandler, os, signal; faulthandler.enable(); os.kill(os.getpid(), signal.SIGSEGV)"
    found = final_traceback(f"{FRAMES}OSError: earlier\n{stderr_of(program)}", at_end=True)
    assert found is not None
    assert found[0] == "Fatal Python error: Segmentation fault"
    assert "most recent call first" in found[1]
    assert "OSError" not in found[1]


@pytest.mark.parametrize("text", ["", "\n", "just words\n", FRAMES, "Traceback (most recent call last):"])
def test_no_traceback_is_none(text: str) -> None:
    """There is none, or it is cut off before its exception."""
    assert final_traceback(text, at_end=True) is None
