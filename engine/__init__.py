"""The engine executes batch plans and decides nothing."""
