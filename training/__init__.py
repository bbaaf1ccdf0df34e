"""Models, parallel layers and layouts, the trainer, native checkpoints."""
