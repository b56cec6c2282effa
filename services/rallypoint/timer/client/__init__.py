"""The agent's end of the timer service."""
