"""One message's spans, without Spark: found in the trace topic, drawn in the terminal."""
