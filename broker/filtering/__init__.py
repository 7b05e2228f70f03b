"""Tag and SQL filters.  Pure."""
