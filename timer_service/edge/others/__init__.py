"""The other timer shards, as this one asks them."""
