"""Pure decisions of an agent: events in, effects out."""
