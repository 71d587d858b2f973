"""Paged-attention backends, chosen by name and separately for prefill and decode (`registry`)."""
