"""Generated from protos/: the wire contract, package duemq.v1."""
