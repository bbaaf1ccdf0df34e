"""Placeholder written while contracts.tracking is in work."""
