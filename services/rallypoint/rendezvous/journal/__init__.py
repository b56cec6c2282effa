"""Journals: where what happened to runs, and what their stores hold, outlives the process."""
