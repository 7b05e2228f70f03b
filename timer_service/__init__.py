"""The timer service: holds delayed messages durably and fires each exactly once, never early."""
