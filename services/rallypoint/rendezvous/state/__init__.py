"""The fenced state of a run: whoever would replace it must know it, and nobody replaces it unseen."""
