"""Messages that repeat."""
