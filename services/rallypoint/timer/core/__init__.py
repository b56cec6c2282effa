"""Pure decisions about timers: deadlines, learned timeouts, progress."""
