"""Where the timer service meets gRPC: its service, brokers, the loop of a shard."""
