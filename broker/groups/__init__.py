"""Consumer groups: members, who owns which queue, what was sent back.  Pure."""
