"""Corpus to tokens: readers, tokenizers, `.bin/.idx` datasets, sample indices. No torch."""
