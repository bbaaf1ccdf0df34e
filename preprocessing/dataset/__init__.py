"""Datasets of tokens on disk: reading, describing and checking them."""
