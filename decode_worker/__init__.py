"""Decode and aggregated instances: continuous batching, KV in, tokens out."""
