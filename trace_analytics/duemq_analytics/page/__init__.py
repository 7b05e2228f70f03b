"""The parts of the report's page: rows in, what its template shows out.  Pure."""
