"""Native checkpoints to and from other layouts and formats."""
