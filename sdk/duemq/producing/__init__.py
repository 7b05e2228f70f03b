"""Inside of the producers."""
