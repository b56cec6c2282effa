"""`python -m rallypoint …`: the same as `rallypoint …`. The only file in the namespace, which has no __init__."""

from rallypoint.cli.main import main

if __name__ == "__main__":
    main(prog_name="rallypoint")
