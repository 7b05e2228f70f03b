"""One message's spans, without Spark: found among all, drawn in the terminal."""
