"""Arithmetic that gives a token the same bits whatever else is computed with it; see docs/adr/0007."""
