"""What one batch of messages is: its checks, columns, due times and names.  Pure."""
