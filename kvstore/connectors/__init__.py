"""How KV pages and the messages about them travel between two instances."""
