"""A folder in which traces are landed once and aggregated step by step; see README.md there."""
