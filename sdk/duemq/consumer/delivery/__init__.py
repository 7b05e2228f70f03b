"""From fetched messages to callbacks: concurrently, or in order."""
