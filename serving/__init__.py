"""What every service is made of: settings, process, gRPC server, metrics, registration."""
