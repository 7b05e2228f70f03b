"""Rows of a DataFrame as messages of a topic."""
