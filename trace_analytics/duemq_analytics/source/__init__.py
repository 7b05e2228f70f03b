"""Topics and spans as Spark data sources."""
