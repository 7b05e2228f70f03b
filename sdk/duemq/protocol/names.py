"""The names of a consumer group's own topics.  Pure.  Brokers make them at the first send-back."""


def retry_topic(group: str) -> str:
    """What the group sent back and shall get again; its consumers subscribe to it unasked."""
    return f"%RETRY%{group}"


def dead_letter_topic(group: str) -> str:
    """What the group has given up."""
    return f"%DLQ%{group}"


TRACE_TOPIC = "%TRACE%"
"""Spans of clients and services, as messages."""
