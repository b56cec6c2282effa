"""The agent as a service: jobs that clients start, watch and steer."""
