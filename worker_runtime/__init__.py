"""What prefill and decode workers share below their policy: engine thread, I/O loop, control and token streams."""
