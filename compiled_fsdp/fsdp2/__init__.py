"""The front end `fully_shard`."""
