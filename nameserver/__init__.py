"""Nameserver: who is there and which topics they serve.  In memory only."""
