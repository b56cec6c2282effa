"""Shared by clients and servers: endpoints, TLS, channels, errors on the wire, replicas and calls to them."""
