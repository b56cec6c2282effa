"""A callback for the Trainer of Hugging Face's transformers.

from rallypoint.torch.transformers import TransformersCallback

trainer = Trainer(..., callbacks=[TransformersCallback()])
"""

from __future__ import annotations

from typing import Any, Literal

from transformers import TrainerCallback

from rallypoint.torch.steps import Steps

__all__ = ["TransformersCallback"]


class TransformersCallback(TrainerCallback):  # type: ignore[misc]  # not installed where types are checked
    """Reports each step as progress, guards it by a timeout, and has a checkpoint saved before the host leaves.

    The Trainer saves as it does otherwise, into its `output_dir`; resume by `train(resume_from_checkpoint=True)`.
    Without an agent the callback does nothing.
    """

    def __init__(self, *, after: float | Literal["auto"] | None = "auto", every_n_steps: int = 10) -> None:
        """Make a callback for one Trainer.

        Args:
            after: timeout of a step in seconds; "auto": learned; None: steps are not guarded. See
                `rallypoint.timer.expires`.
            every_n_steps: steps between two looks for an announced departure. Each is a reduction over all ranks, and
                on a GPU a wait for it.

        Raises:
            ValueError, TypeError: an argument is invalid.
        """
        self._steps = Steps(after, every_n_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step."""
        self._steps.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step; have the Trainer save a checkpoint if a host will leave."""
        if self._steps.end(state.global_step, args.device):
            control.should_save = True

    def leave(self) -> None:
        """Leave the present step, for a program that goes on after an exception of `train`: callbacks do not see it."""
        self._steps.leave()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a saved checkpoint."""
        self._steps.saved()
