"""Arithmetic of a training step, counted from the settings alone."""

import math

from training.config import ModelConfig
from training.parameters import stored_parameters


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, padding rows of the vocabulary included; a tied matrix once."""
    return sum(math.prod(shape) for shape, _ in stored_parameters(model).values())


def forward_flops_per_token(model: ModelConfig, seq_length: int) -> int:
    """Multiply-adds, each as two operations, of one token's forward pass.

    Matrix products and attention scores count, attention in full (not only its causal half), as in
    Narayanan et al. 2021 (arXiv:2104.04473, section 3.4 and appendix).
    """
    mlp = (3 if model.is_gated else 2) * model.hidden_size * model.ffn_hidden_size
    attention = model.hidden_size * (model.qkv_size + model.attention_size)
    scores = 2 * seq_length * model.attention_size
    layer = mlp + attention + scores
    return 2 * (model.num_layers * layer + model.hidden_size * model.padded_vocab_size)


def step_flops_per_token(model: ModelConfig, seq_length: int) -> int:
    """Operations per token of forward and backward; backward does each product twice. Recomputation does not count."""
    return 3 * forward_flops_per_token(model, seq_length)
