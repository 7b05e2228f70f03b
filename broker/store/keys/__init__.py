"""Runs of hashes of records' keys (`key_index`), and what builds them (`key_builder`)."""
