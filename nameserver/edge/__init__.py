"""What others reach: the service Nameserver and the metrics.  Protobuf and gRPC live here only."""
