"""Trace-driven cluster simulator: the production cores under a virtual clock, with a cost model for an engine."""
