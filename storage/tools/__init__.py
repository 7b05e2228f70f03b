"""`duemq-storage`: look into files, verify them, accept a loss."""
