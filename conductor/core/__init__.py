"""The pure Conductor: events and a time in, decisions out. See `machine.ConductorCore`."""
