"""What the stages agree on: artifacts, recipes, the store, errors, configuration, tracking."""
