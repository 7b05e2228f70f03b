"""What is decided about messages that repeat."""
