"""Rules that both ends share.  Plain Python, no gRPC."""
