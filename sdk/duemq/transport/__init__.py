"""Channels, routes, statuses, retries: what every client does with gRPC."""
