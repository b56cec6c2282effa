"""A scripted rendezvous service that checks an agent in any language against the rules of docs/protocol.md."""
