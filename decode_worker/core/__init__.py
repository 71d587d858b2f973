"""Pure policy of a decode or aggregated instance: when to lend pages, what to run, when to let go."""
