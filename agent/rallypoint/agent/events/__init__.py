"""Events of a job: recorded, published, handed to handlers."""
