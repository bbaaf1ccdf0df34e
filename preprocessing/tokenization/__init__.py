"""Tokenizers: loading them, training them, and the engines that run them."""
