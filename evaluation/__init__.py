"""Perplexity, scoring and reports, straight from a sharded checkpoint."""
