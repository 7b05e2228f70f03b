"""A member's share of its group's queues: taken over, held, given up."""
