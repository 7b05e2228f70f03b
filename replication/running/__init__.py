"""Replicas that run: streams, roles, calls of the store."""
