"""A leader's term; others see `Leading` alone."""

from duemq_server.replication.running.leading.term import Leading

__all__ = ["Leading"]
