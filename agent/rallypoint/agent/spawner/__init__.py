"""The process that forks workers, and its client."""
