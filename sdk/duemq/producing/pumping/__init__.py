"""What leaves when, and where to: plain Python.  `now_ms` and events in, a `PumpStep` out."""
