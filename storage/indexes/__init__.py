"""Files that find entries of the log: consume queues, time index, key runs."""
