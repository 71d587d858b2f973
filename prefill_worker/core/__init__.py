"""Pure policy of a prefill instance: when to ask for pages, what to send, when to let go."""
