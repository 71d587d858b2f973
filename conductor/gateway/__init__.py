"""The front door: owns the client's socket, the text of a request, its token log and its terminal state."""
