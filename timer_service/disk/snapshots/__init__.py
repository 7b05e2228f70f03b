"""A leader's snapshot: how it is read, how it arrives, and how it is installed."""
