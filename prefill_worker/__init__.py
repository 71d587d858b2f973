"""Prefill instances: chunked prefill, streaming KV out."""
