"""Jobs that cancel or shift what is pending of a topic."""
