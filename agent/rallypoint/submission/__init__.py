"""Submission of a job to the agents of several hosts: launched on all, followed, stopped on all."""
