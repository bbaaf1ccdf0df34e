"""Names and rows of GPT-2, GPT-NeoX and Llama-style models in Hugging Face files, against the canonical ones.

GPT-2 (Conv1D) stores matrices as (in, out) and its fused projection as [all q; all k; all v].
Llama, Mistral and Qwen store (out, in) and q, k, v apart. Canonical rows of the fused projection go
group by group: its query heads, one key head, one value head; so do GPT-NeoX's, where a group is a head.
"""

from collections.abc import Iterator

from conversion.huggingface_architecture import Architecture
from conversion.huggingface_encoder_names import encoder_links
from conversion.link_parts import matrices_of, norm_links, query_key_value_runs, same_rows, turned, vocab_link
from conversion.linked_rows import Link, Run
from training.model_config import ModelConfig

_GPT2_LAYER = {
    "attn.norm": "ln_1",
    "attn.out": "attn.c_proj",
    "mlp.norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_NEOX_LAYER = {
    "attn.norm": "input_layernorm",
    "attn.qkv": "attention.query_key_value",
    "attn.out": "attention.dense",
    "mlp.norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_LLAMA_LAYER = {
    "attn.norm": "input_layernorm",
    "attn.out": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def links_of(model: ModelConfig, architecture: Architecture) -> list[Link]:
    """List what corresponds to what, for every tensor of a model.

    Args:
        model: With its vocabulary size; only rows of real tokens are linked.
    """
    if architecture in ("bert", "megatron-bert", "roberta", "t5"):
        return list(encoder_links(model, architecture))
    if architecture == "gpt2":
        return list(_gpt2(model))
    return list(_neox(model) if architecture == "gpt_neox" else _llama(model, architecture))


def _gpt2(model: ModelConfig) -> Iterator[Link]:
    yield vocab_link(model, "embedding.word.weight", "transformer.wte.weight")
    yield same_rows(
        "embedding.position.weight", "transformer.wpe.weight", (model.max_position_embeddings, model.hidden_size)
    )
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        for name, (rows, columns) in matrices_of(model).items():
            foreign = f"{theirs}.{_GPT2_LAYER[name]}"
            yield turned(f"{ours}.{name}.weight", f"{foreign}.weight", rows, columns)
            yield same_rows(f"{ours}.{name}.bias", f"{foreign}.bias", (rows,))
        runs = tuple(run for part in query_key_value_runs(model) for run in part)
        foreign = f"{theirs}.attn.c_attn"
        shape = (model.hidden_size, model.qkv_size)
        yield Link(f"{ours}.attn.qkv.weight", f"{foreign}.weight", shape, runs, is_transposed=True)
        yield Link(f"{ours}.attn.qkv.bias", f"{foreign}.bias", (model.qkv_size,), runs)
        for name in ("attn.norm", "mlp.norm"):
            yield from norm_links(model, f"{ours}.{name}", f"{theirs}.{_GPT2_LAYER[name]}")
    yield from norm_links(model, "final_norm", "transformer.ln_f")
    if not model.tied_embeddings:
        yield vocab_link(model, "output.weight", "lm_head.weight")


def _neox(model: ModelConfig) -> Iterator[Link]:
    yield vocab_link(model, "embedding.word.weight", "gpt_neox.embed_in.weight")
    matrices = {"attn.qkv": (model.qkv_size, model.hidden_size), **matrices_of(model)}
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"gpt_neox.layers.{layer}"
        for name, shape in matrices.items():
            yield same_rows(f"{ours}.{name}.weight", f"{theirs}.{_NEOX_LAYER[name]}.weight", shape)
            yield same_rows(f"{ours}.{name}.bias", f"{theirs}.{_NEOX_LAYER[name]}.bias", shape[:1])
        for name in ("attn.norm", "mlp.norm"):
            yield from norm_links(model, f"{ours}.{name}", f"{theirs}.{_NEOX_LAYER[name]}")
    yield from norm_links(model, "final_norm", "gpt_neox.final_layer_norm")
    if not model.tied_embeddings:
        yield vocab_link(model, "output.weight", "embed_out.weight")


def _llama(model: ModelConfig, architecture: Architecture) -> Iterator[Link]:
    yield vocab_link(model, "embedding.word.weight", "model.embed_tokens.weight")
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for part, runs in zip("qkv", query_key_value_runs(model), strict=True):
            # Rows of q, k and v are counted in the fused order [q; k; v]; here each starts at 0.
            first, rows = runs[0].foreign, sum(run.count for run in runs)
            own = tuple(Run(run.canonical, run.foreign - first, run.count) for run in runs)
            foreign = f"{theirs}.self_attn.{part}_proj"
            yield Link(f"{ours}.attn.qkv.weight", f"{foreign}.weight", (rows, model.hidden_size), own)
            if model.qkv_bias:
                yield Link(f"{ours}.attn.qkv.bias", f"{foreign}.bias", (rows,), own)
        for name in ("q_norm", "k_norm") if model.qk_norm else ():
            yield same_rows(f"{ours}.attn.{name}.weight", f"{theirs}.self_attn.{name}.weight", (model.head_dim,))
        has_experts = model.has_experts(layer)
        for name, shape in matrices_of(model).items():
            if not (has_experts and name.startswith("mlp.")):
                yield same_rows(f"{ours}.{name}.weight", f"{theirs}.{_LLAMA_LAYER[name]}.weight", shape)
        if has_experts:
            yield from _experts(model, f"{ours}.mlp", theirs, architecture)
        for name in ("attn.norm", "mlp.norm"):
            yield from norm_links(model, f"{ours}.{name}", f"{theirs}.{_LLAMA_LAYER[name]}")
    yield from norm_links(model, "final_norm", "model.norm")
    if not model.tied_embeddings:
        yield vocab_link(model, "output.weight", "lm_head.weight")


def _experts(model: ModelConfig, ours: str, layer: str, architecture: Architecture) -> Iterator[Link]:
    if model.moe is None:
        return
    is_mixtral = architecture == "mixtral"
    theirs = f"{layer}.block_sparse_moe" if is_mixtral else f"{layer}.mlp"
    names = {"gate": "w1", "up": "w3", "down": "w2"} if is_mixtral else {n: f"{n}_proj" for n in ("gate", "up", "down")}
    yield same_rows(f"{ours}.router.weight", f"{theirs}.gate.weight", (model.moe.num_experts, model.hidden_size))
    experts = {f"experts.{n}": (f"experts.{n}", model.expert_ffn_hidden_size) for n in range(model.moe.num_experts)}
    if model.moe.shared_ffn_hidden_size is not None:
        experts["shared"] = ("shared_expert", model.moe.shared_ffn_hidden_size)
        yield same_rows(f"{ours}.shared.router.weight", f"{theirs}.shared_expert_gate.weight", (1, model.hidden_size))
    for own, (foreign, width) in experts.items():
        for name, theirs_name in names.items():
            shape = (model.hidden_size, width) if name == "down" else (width, model.hidden_size)
            yield same_rows(f"{ours}.{own}.{name}.weight", f"{theirs}.{foreign}.{theirs_name}.weight", shape)
