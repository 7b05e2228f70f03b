"""The broker: stores messages durably, hands them out, coordinates groups.  See README.md."""
