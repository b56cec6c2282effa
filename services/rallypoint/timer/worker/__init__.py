"""Timers inside a worker; imports no gRPC."""
