"""Spans of messages, and how their contexts travel."""
