"""What is measured: one file a benchmark."""
