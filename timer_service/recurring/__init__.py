"""Messages that repeat: when they are due, and which of them wait.  Pure but for zone data."""
