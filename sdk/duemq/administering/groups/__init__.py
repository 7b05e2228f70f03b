"""Consumer groups, asked of all brokers: `describing` them, and `changing` where they go on."""
