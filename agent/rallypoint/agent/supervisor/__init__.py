"""The agent as a service: clients start, watch and control jobs."""
