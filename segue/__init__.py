"""Shared vocabulary and pure machines of Segue: standard library and msgspec only, no clock, no I/O."""
