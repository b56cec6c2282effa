"""A worker that does not move: how it is diagnosed and ended."""
