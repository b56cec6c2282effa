"""Unix sockets and shared tables between workers and their agent."""
