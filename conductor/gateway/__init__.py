"""gateway of the conductor."""
