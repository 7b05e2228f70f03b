"""trace_analytics."""
