"""A replica that does not lead: it follows, and stands when nobody leads."""
