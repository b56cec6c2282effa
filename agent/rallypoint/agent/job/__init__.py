"""One job on one host, from joining to its result."""
