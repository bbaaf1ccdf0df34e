"""Which samples a model sees, in which order, and where each came from."""
