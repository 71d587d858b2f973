"""The Conductor (admission and routing) and the gateways beside it (the client's socket)."""
