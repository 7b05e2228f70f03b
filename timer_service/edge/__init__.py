"""Where the timer service meets gRPC: its service, its streams to brokers, metrics."""
