"""Diagnosis and end of a hung worker."""
