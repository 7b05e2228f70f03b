"""Which timers are due, dispatched, cancelled.  Pure."""
