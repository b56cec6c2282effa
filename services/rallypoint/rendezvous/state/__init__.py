"""The fenced state of a run: a writer must know the current state to replace it, and sees every replacement."""
