"""Delayed messages that are kept back."""
