"""From brokers to process queues: pull streams, filters, offsets."""
