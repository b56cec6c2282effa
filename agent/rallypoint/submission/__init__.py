"""A job that is run on the agents of several hosts from afar: launched on all, followed, stopped everywhere."""
