"""What every worker process shares: engine thread, I/O loop, control streams to Conductors and gateways."""
