"""Checkpoint readers: safetensors and GGUF, tensor by tensor into preallocated parameters."""
