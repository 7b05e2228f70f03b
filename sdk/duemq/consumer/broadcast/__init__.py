"""Every member gets every message; offsets lie in a file."""
