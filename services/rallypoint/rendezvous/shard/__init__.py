"""Runs, store and state over one journal, and which replica answers for a run."""
