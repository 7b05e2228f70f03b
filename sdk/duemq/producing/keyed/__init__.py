"""Messages under timer keys: requests to timer shards, which gather until they are sent."""
