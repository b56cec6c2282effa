"""The key-value store of a run: spaces that outlive rounds or end with them, durable before anyone is told."""
