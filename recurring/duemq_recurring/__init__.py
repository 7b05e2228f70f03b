"""Messages that repeat: when they are due, and which of them wait.  Pure but for zone data."""

__version__ = "0.1.0"
