"""What clients and servers share: endpoints, TLS, channels, errors on the wire, replicas and the calls to them."""
