"""Kits that check agents and workers in any language against the rules of docs: scripted services and sockets."""
