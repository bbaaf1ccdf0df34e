"""Arithmetic of a training step, counted from the settings alone."""

import math

from training.model_config import ModelConfig
from training.parameters import stored_parameters


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, padding rows of the vocabulary included; a tied matrix once."""
    return sum(math.prod(shape) for shape, _ in stored_parameters(model).values())


def active_parameter_count(model: ModelConfig) -> int:
    """Parameters that one token meets: of the experts of a layer only `top_k`, and the shared one."""
    if model.moe is None:
        return parameter_count(model)
    idle = model.moe.num_experts - model.moe.top_k
    layers = sum(model.has_experts(layer) for layer in range(model.num_layers))
    return parameter_count(model) - layers * idle * _mlp(model, model.expert_ffn_hidden_size)


def forward_flops_per_token(model: ModelConfig, seq_length: int) -> int:
    """Multiply-adds, each as two operations, of one token's forward pass.

    Matrix products and attention scores count, attention in full (not only its causal half), as in
    Narayanan et al. 2021 (arXiv:2104.04473, section 3.4 and appendix); with a sliding window, up to
    its width. Of a layer's experts those count that a token meets.
    """
    scores = 2 * min(seq_length, model.sliding_window or seq_length) * model.attention_size
    layers = sum(layer_products(model, layer) for layer in range(model.num_layers))
    return 2 * (model.num_layers * scores + layers + model.hidden_size * model.padded_vocab_size)


def layer_products(model: ModelConfig, layer: int) -> int:
    """Weights of a layer's matrices that one token meets: its multiply-adds, attention's scores left out."""
    return model.hidden_size * (model.qkv_size + model.attention_size) + _active_mlp(model, layer)


def _active_mlp(model: ModelConfig, layer: int) -> int:
    if model.moe is None or not model.has_experts(layer):
        return _mlp(model, model.ffn_hidden_size)
    shared = model.moe.shared_ffn_hidden_size
    gate = 0 if shared is None else model.hidden_size + _mlp(model, shared)
    router = model.hidden_size * model.moe.num_experts
    return router + gate + model.moe.top_k * _mlp(model, model.expert_ffn_hidden_size)


def _mlp(model: ModelConfig, width: int) -> int:
    return (3 if model.is_gated else 2) * model.hidden_size * width


def step_flops_per_token(model: ModelConfig, seq_length: int) -> int:
    """Operations per token of forward and backward; backward does each product twice. Recomputation does not count."""
    return 3 * forward_flops_per_token(model, seq_length)
