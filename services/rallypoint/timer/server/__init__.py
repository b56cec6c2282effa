"""The timer service: watchdog, outbox, learned timeouts on disk, servicer."""
