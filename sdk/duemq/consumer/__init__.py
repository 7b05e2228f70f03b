"""Consumers.  `push` and `pull` are the asyncio ones, `blocking` the others."""
