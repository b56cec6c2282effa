"""The key-value store of a run: spaces of runs and rounds; every change is durable before it is published."""
