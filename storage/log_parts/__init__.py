"""What a log does beside being written: it is read, and opened (log.py)."""
