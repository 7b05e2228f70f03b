"""Dead letters, and sending them again."""
