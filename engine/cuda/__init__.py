"""The GPU path: fused layer operations, the decode step as one CUDA graph, and the runner that drives both."""
