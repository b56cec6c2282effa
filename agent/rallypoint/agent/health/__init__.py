"""Health of the host: checks before a round and while it runs."""
