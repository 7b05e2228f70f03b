"""The asyncio admin client; the synchronous one is a face of it."""


class Admin:
    """Topics, groups, the cluster."""
