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


def forward_flops_per_token(model: ModelConfig, seq_length: int, decoder_length: int | None = None) -> int:
    """Multiply-adds, each as two operations, of one token's forward pass.

    Matrix products and attention scores count, attention in full (not only its causal half), as in
    Narayanan et al. 2021 (arXiv:2104.04473, section 3.4 and appendix); with a sliding window, up to
    its width. Of a layer's experts those count that a token meets. With an encoder and a decoder, the
    work of a whole row is divided by the encoder's tokens.

    Args:
        seq_length: Tokens of a row; of the encoder's where there is one.
        decoder_length: Tokens of a row of the decoder.
    """
    if model.is_encoder_decoder:
        return 2 * _encoder_decoder_row(model, seq_length, decoder_length or seq_length) // seq_length
    scores = 2 * min(seq_length, model.sliding_window or seq_length) * model.attention_size
    layers = sum(layer_products(model, layer) for layer in range(model.num_layers))
    head = model.hidden_size**2 if model.head == "masked" else 0
    return 2 * (model.num_layers * scores + layers + head + model.hidden_size * model.padded_vocab_size)


def _encoder_decoder_row(model: ModelConfig, encoder: int, decoder: int) -> int:
    """Multiply-adds of a row: products by tokens that go through them, and scores of query by key tokens."""
    width, kv = model.attention_size, model.hidden_size * model.cross_kv_size
    of_encoder = encoder * layer_products(model, 0) + 2 * encoder * encoder * width
    of_decoder = decoder * (layer_products(model, model.num_layers) - kv) + encoder * kv
    of_decoder += 2 * decoder * (decoder + encoder) * width
    output = decoder * model.hidden_size * model.padded_vocab_size
    return model.num_layers * of_encoder + (model.decoder_layers or 0) * of_decoder + output


def layer_products(model: ModelConfig, layer: int) -> int:
    """Weights of a layer's matrices that one token meets: its multiply-adds, attention's scores left out."""
    cross = 2 * model.attention_size + model.cross_kv_size if model.is_decoder_layer(layer) else 0
    return model.hidden_size * (model.qkv_size + model.attention_size + cross) + _active_mlp(model, layer)


def _active_mlp(model: ModelConfig, layer: int) -> int:
    if model.moe is None or not model.has_experts(layer):
        return _mlp(model, model.ffn_hidden_size)
    shared = model.moe.shared_ffn_hidden_size
    gate = 0 if shared is None else model.hidden_size + _mlp(model, shared)
    router = model.hidden_size * model.moe.num_experts
    return router + gate + model.moe.top_k * _mlp(model, model.expert_ffn_hidden_size)


def _mlp(model: ModelConfig, width: int) -> int:
    return (3 if model.is_gated else 2) * model.hidden_size * width


def step_flops_per_token(model: ModelConfig, seq_length: int, decoder_length: int | None = None) -> int:
    """Operations per token of forward and backward; backward does each product twice. Recomputation does not count."""
    return 3 * forward_flops_per_token(model, seq_length, decoder_length)
