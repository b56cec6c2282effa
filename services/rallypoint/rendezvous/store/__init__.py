"""The key-value store of a run: spaces of runs and rounds, durable before anyone is told."""
