"""Spans of brokers and timer services."""
