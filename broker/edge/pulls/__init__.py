"""Parts of pulls: who waits (`parking`), what reads (`disk_reads`), whole frames (`fetching`)."""
