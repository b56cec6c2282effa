"""Analysis of failed workers: cause, time and order."""
