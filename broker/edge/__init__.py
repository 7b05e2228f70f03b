"""Where the broker meets gRPC: services, requests as they wait, metrics."""
