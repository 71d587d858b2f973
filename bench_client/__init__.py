"""Load generator for OpenAI-compatible streaming servers: `segue bench`."""
