"""How many numbers a rank keeps between forward and backward, from the settings alone. No torch.

Counted for the layers as they are (`training/block.py`): what autograd saves of a block of each family, at each
recompute mode, under tensor parallelism with and without cut sequences. Letters: h hidden, a query heads x width,
g key heads x width, f width of the MLP; all of one token.
"""

from training.config import PretrainConfig
from training.model_config import ModelConfig
from training.pipeline_split import layers_of_stages, rank_of_stage, stages_of_rank

_CHUNK_LOGITS = 1 << 22  # training/loss.py, on the CPU
_MIN_CHUNK_TOKENS = 256
_CHUNK_COPIES = 2  # logits, and their gradient


def activations_bytes(config: PretrainConfig, rank: int, bytes_per_number: int) -> int:
    """Bytes that a rank of the pipeline keeps at the worst moment of a step, and what backward adds to it.

    That moment is the loss, or the backward pass of the first block behind it, whichever takes more.
    """
    tokens, layout = _tokens(config), config.layout
    kept = sum(
        count * sum(_kept(config, layer, bytes_per_number) for layer in layers)
        for layers, count in _in_flight(config, rank)
    )
    stages = [_layers(config, stage) for stage in stages_of_rank(layout, rank)]
    kept += _waiting_halves(config, rank) * max(sum(_gradients(config, n) for n in layers) for layers in stages)
    # Backward goes through a stage from its end: what stands behind a layer is gone when its turn comes.
    most = 0.0
    for layers in stages:
        behind = 0.0
        for n in reversed(layers):
            most = max(most, _transient(config, n, bytes_per_number) - behind)
            behind += _kept(config, n, bytes_per_number)
    has_head = rank_of_stage(layout, layout.num_stages - 1) == rank
    head = _head_bytes(config, tokens, bytes_per_number) if has_head else 0
    return int(kept * tokens * bytes_per_number) + max(head, int(most * tokens * bytes_per_number))


def _waiting_halves(config: PretrainConfig, rank: int) -> int:
    """Micro-batches of a stage whose gradients wait for the half of backward that is for the weights.

    The first stage has no other half, and so none that wait.
    """
    if config.layout.schedule == "1f1b" or rank == 0 == config.layout.num_stages - config.layout.pipeline_parallel:
        return 0
    return rank + 1 if config.layout.schedule == "zero_bubble" else 1


def _gradients(config: PretrainConfig, layer: int) -> float:
    """Numbers of one token: gradients of the results of a layer's matrices and norms."""
    model, tp = config.model, config.layout.tensor_parallel
    hidden = model.hidden_size / _sequence_parts(config)
    projected = model.attention_size + 2 * model.head_dim * model.num_query_groups
    return projected / tp + _mlp_width(config, layer) + 2 * model.hidden_size + 2 * hidden


def _tokens(config: PretrainConfig) -> int:
    """Tokens of a micro-batch on a rank; both stacks' where there are two."""
    length = config.seq_length + config.decoder_length
    return length // config.layout.context_parallel * config.micro_batch_size


def _kept(config: PretrainConfig, layer: int, bytes_per_number: int) -> float:
    """Numbers of one token that a layer keeps."""
    mode = config.recompute_of(layer)
    if mode == "full":
        return config.model.hidden_size / _sequence_parts(config)
    if mode == "selective":
        return _products(config, layer)
    return _everything(config, layer, bytes_per_number)


def _transient(config: PretrainConfig, layer: int, bytes_per_number: int) -> float:
    """Numbers of one token that only the backward pass of a layer has: gradients, and what it computes again."""
    mode = config.recompute_of(layer)
    again = 0.0 if mode == "none" else _everything(config, layer, bytes_per_number)
    if mode == "selective":
        again -= _products(config, layer) - config.model.hidden_size / _sequence_parts(config)
    return again + _mlp_width(config, layer) + config.model.hidden_size / _sequence_parts(config)


def _sequence_parts(config: PretrainConfig) -> int:
    return config.layout.tensor_parallel if config.layout.sequence_parallel else 1


def _mlp_width(config: PretrainConfig, layer: int) -> float:
    """Outputs of a token's first matrices of the MLP, on a rank."""
    model, matrices = config.model, 2 if config.model.is_gated else 1
    if model.moe is None or not model.has_experts(layer):
        return matrices * model.ffn_hidden_size / config.layout.tensor_parallel
    width = model.moe.top_k * model.expert_ffn_hidden_size + (model.moe.shared_ffn_hidden_size or 0)
    return matrices * width / config.layout.tensor_parallel


def _everything(config: PretrainConfig, layer: int, bytes_per_number: int) -> float:
    """What a layer keeps without recomputation."""
    model, tp = config.model, config.layout.tensor_parallel
    hidden = model.hidden_size / _sequence_parts(config)
    norms = 1 if model.shared_norm else 2
    # An RMSNorm keeps its input, the input over its root mean square, and its output; a LayerNorm no such middle.
    kept = norms * _per_norm(model) * hidden + _attention(model) / tp
    kept += 2 * _mlp_width(config, layer)  # in and out of the activation; gated: gate, up, act(gate) and the product
    if model.moe is not None and model.has_experts(layer):
        kept += 2 * model.moe.top_k * model.hidden_size  # a token's copies for its experts, in and out
    if model.dropout:
        kept += 2 * hidden / bytes_per_number  # two masks, a byte each
    return kept


def _per_norm(model: ModelConfig) -> int:
    return 3 if model.norm == "rmsnorm" else 2


def _attention(model: ModelConfig) -> float:
    queries, keys = model.attention_size, model.head_dim * model.num_query_groups
    is_grouped = model.num_query_groups != model.num_attention_heads
    is_turned = model.position == "rope"
    # Queries, keys, values and output; the projection too where only the values are a view of it.
    kept = 4 * queries + (2 * queries if is_turned and not is_grouped else 0)
    if model.qk_norm:
        kept += queries + keys + (queries + 2 * keys if is_grouped else 0)
    return kept


def _products(config: PretrainConfig, layer: int) -> float:
    """What `selective` keeps: a layer's input and the results of its matrix products and attention."""
    model, tp = config.model, config.layout.tensor_parallel
    hidden, queries = model.hidden_size / _sequence_parts(config), model.attention_size
    projected = queries + 2 * model.head_dim * model.num_query_groups
    kept = hidden + (projected + queries) / tp + model.hidden_size + _mlp_width(config, layer)
    experts = model.moe.top_k if model.moe is not None and model.has_experts(layer) else 1
    return kept + experts * model.hidden_size


def _head_bytes(config: PretrainConfig, tokens: int, bytes_per_number: int) -> int:
    """The last norm, the loss with the gradients that it makes in the forward pass, and a chunk of logits."""
    model, tp = config.model, config.layout.tensor_parallel
    exact = max(4, bytes_per_number)
    columns = model.padded_vocab_size // tp
    chunk = min(tokens, max(_MIN_CHUNK_TOKENS, _CHUNK_LOGITS // columns)) * columns
    hidden = (_per_norm(model) + 2) * model.hidden_size * tokens * bytes_per_number
    return hidden + columns * model.hidden_size * exact + _CHUNK_COPIES * chunk * exact


def _layers(config: PretrainConfig, stage: int) -> range:
    return layers_of_stages(config.model, config.layout)[stage]


def _in_flight(config: PretrainConfig, rank: int) -> list[tuple[range, int]]:
    """Layers of each stage of a rank, and of how many micro-batches it keeps their activations at once."""
    layout, passes = config.layout, config.num_micro_batches
    ranks, stages = layout.pipeline_parallel, stages_of_rank(layout, rank)
    layers = [_layers(config, stage) for stage in stages]
    if layout.schedule != "1f1b":
        # As many micro-batches as there are ranks, on each stage; the half backward for the weights frees them.
        return [(part, min(ranks, passes)) for part in layers]
    if len(layers) == 1:
        return [(layers[0], min(ranks - rank, passes))]
    # Narayanan et al. 2021, section 2.2: warm-up passes, and the one that comes before the first backward.
    per_round = passes // (passes // ranks)
    begun = min(2 * (ranks - 1 - rank) + (len(layers) - 1) * per_round + 1, len(layers) * passes)
    turns = [(n // per_round) % len(layers) for n in range(begun)]
    return [(part, turns.count(place)) for place, part in enumerate(layers)]
