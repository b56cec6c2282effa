"""Bounds that no sensible job comes near.

The rendezvous service has the same, and refuses what passes them. Here they give the one-line error before anything is
started, and keep numbers within what a message can hold.
"""

MOST_NODES = 100_000
MOST_WORKERS = 16_384
MOST_RESTARTS = 1_000_000
MOST_SECONDS = 25 * 24 * 3600
