"""The vocabulary of everything in the rendezvous: errors, limits, ownership, entries, cooperative work."""
