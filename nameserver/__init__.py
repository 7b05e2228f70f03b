"""nameserver."""
