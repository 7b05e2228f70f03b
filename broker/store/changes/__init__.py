"""Changes of a store but for sends and topics: decisions that take it (store.py)."""
