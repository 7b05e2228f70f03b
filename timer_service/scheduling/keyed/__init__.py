"""Timers under keys of their owners: what waits under them, what is decided, what is remembered."""
