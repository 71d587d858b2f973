"""KV store: connectors that move pages, events that say where blocks are, tiers."""
