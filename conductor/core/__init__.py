"""core of the conductor."""
