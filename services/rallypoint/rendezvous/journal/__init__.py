"""Journals: the facts of runs and the contents of their stores, so that both outlive the process."""
