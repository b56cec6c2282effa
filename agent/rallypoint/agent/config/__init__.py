"""The settings of a job: values and their checks only."""
