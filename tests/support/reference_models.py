"""Models of every family with random weights, in our layers and in transformers, and gradients by canonical name."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from conversion.catalogue import Box, TensorEntry
from conversion.huggingface_architecture import Architecture, architecture_of
from conversion.huggingface_config import to_huggingface
from conversion.huggingface_names import links_of
from conversion.linked_rows import Link, derive_canonical, derive_foreign
from training.checkpoint import spread_copies, state_tensors
from training.data import Batch
from training.dtensors import as_dtensors
from training.model_config import ModelConfig
from training.parameters import stored_parameters
from training.trainer import Trainer

SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "aux_loss_coef": 0.1}

# Changes of the tiny models of training_cases, by name; each is one function that transformers computes too.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2 relu untied": ("gpt2", {"activation": "relu", "tied_embeddings": False}),
    "llama": ("llama", {}),
    "llama tied geglu": ("llama", {"tied_embeddings": True, "activation": "geglu_tanh"}),
    "llama linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama 3.1": ("llama", {"rope_scaling": {"rope_type": "llama3", **SCALED}, "rotary_base": 500.0}),
    "llama yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", **SCALED}, "rotary_base": 500.0}),
    "mistral": ("mistral", {"sliding_window": 5, "num_query_groups": 2}),
    "qwen2": ("qwen2", {"num_query_groups": 2, "tied_embeddings": True}),
    "qwen3": ("qwen3", {"num_query_groups": 2, "head_dim": 16}),
    "neox": ("neox", {"rotary_percent": 0.5}),
    "neox serial": ("neox", {"parallel_residual": False}),
    "mixtral": ("mixtral", {"num_query_groups": 2, "sliding_window": 7, "moe": EXPERTS}),
    "qwen2 experts": ("qwen2", {"moe": {**EXPERTS, "normalize_top_k": False, "shared_ffn_hidden_size": 40}}),
    "qwen3 experts": ("qwen3_moe", {"num_query_groups": 2, "moe": {**EXPERTS, "layer_interval": 2}}),
}


class HeldTensors:
    """A catalogue of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.entries = {name: TensorEntry(name, tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self.tensors[name][tuple(slice(a, b) for a, b in box)]

    def close(self) -> None:
        """Hold on to nothing that must be closed."""


def random_weights(model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights large enough that every part of the model matters; padding rows of the vocabulary are zero."""
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for name, (shape, _) in stored_parameters(model).items():
        weight = torch.randn(shape, generator=generator).mul_(0.2).to(dtype)
        if name in ("embedding.word.weight", "output.weight"):
            weight[model.vocab_size :] = 0
        weights[name] = weight + 1 if name.endswith("norm.weight") else weight
    return weights


def put_weights(trainer: Trainer, weights: Mapping[str, Tensor]) -> None:
    """Give this rank its part of each weight."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, view in state_tensors(trainer.parameters, trainer.mesh).items():
        assert isinstance(view, DTensor)
        whole = distribute_tensor(weights[name], view.device_mesh, view.placements, src_data_rank=None)
        view.to_local().copy_(whole.to_local())
    spread_copies(trainer.parameters)


def gradients_of(
    trainer: Trainer, inputs: Tensor, labels: Tensor, context: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Whole gradients of the mean loss over all ranks' rows, of the parameters of this rank's stage."""
    rows = torch.arange(len(inputs)) + len(inputs) * trainer.mesh.rank("dp")
    num_tokens = labels.numel() * trainer.mesh.size("dp")
    return batch_gradients(trainer, Batch(inputs, labels, rows, context=context or {}), num_tokens)


def batch_gradients(trainer: Trainer, batch: Batch, num_tokens: float) -> dict[str, Tensor]:
    """Whole gradients of the summed loss divided by `num_tokens`, of the parameters of this rank's stages."""
    trainer.engine.run(batch, num_tokens=num_tokens)
    found: dict[str, Tensor] = {}
    for parameter, gradient in zip(trainer.parameters, trainer.finisher.finish(), strict=True):
        for name, part in as_dtensors(gradient, parameter, trainer.mesh).items():
            found[name] = part.full_tensor()  # type: ignore[attr-defined]
    for parameter in trainer.parameters:
        parameter.sharded.grad = None
    return found


def transformers_model(model: ModelConfig, weights: Mapping[str, Tensor], folder: Path) -> Any:
    """The same model in transformers, read from the files of an export."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    links = links_of(model, architecture_of(model))
    foreign = derive_foreign(HeldTensors(weights), links)
    state = {name: foreign.read(name, entry.box).contiguous() for name, entry in foreign.entries.items()}
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_huggingface(model, dtype="float32", token_ids={})))
    found, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return found.train()


def outside_links(model: ModelConfig, like: Architecture, renames: Mapping[str, str]) -> list[Link]:
    """Links to a model of transformers that no export is written for, whose names are nearly those of another one.

    Args:
        like: Architecture whose names are taken.
        renames: Parts of those names, and what stands in their place.
    """
    held = stored_parameters(model)
    links = []
    for link in links_of(model, like):
        foreign = link.foreign
        for old, new in renames.items():
            foreign = foreign.replace(old, new)
        if link.canonical in held:
            links.append(replace(link, foreign=foreign))
    covered = {link.canonical for link in links}
    for link in list(links):
        bias = link.canonical.removesuffix("weight") + "bias"
        if bias in held and bias not in covered:
            name = link.foreign.removesuffix("weight") + "bias"
            links.append(Link(bias, name, link.foreign_shape[:1], link.runs))
    return links


def fill(reference: Any, weights: Mapping[str, Tensor], links: Sequence[Link]) -> None:
    """Give a model of transformers our weights; biases that we have no counterpart of become zero."""
    foreign = derive_foreign(HeldTensors(weights), links)
    named = dict(reference.named_parameters())
    for name, parameter in named.items():
        if name in foreign.entries:
            parameter.data.copy_(foreign.read(name, foreign.entries[name].box))
        else:
            assert name == "lm_head.bias"
            parameter.data.zero_()
    assert not foreign.entries.keys() - named.keys() - {"lm_head.weight"}


def transformers_gradients(
    reference: Any, model: ModelConfig, links: Sequence[Link] | None = None
) -> dict[str, Tensor]:
    """Gradients of a model of transformers by canonical name.

    Args:
        links: How its names correspond, where the model cannot be exported.
    """
    architecture = architecture_of(model) if links is None else ""
    links = links_of(model, architecture_of(model)) if links is None else links
    names = {link.foreign for link in links}
    held = {}
    for name, parameter in reference.named_parameters():
        held |= _apart(name, parameter.grad, architecture)
    held = {name: gradient for name, gradient in held.items() if name in names}
    shapes = {name: shape for name, (shape, _) in stored_parameters(model).items()}
    ours = derive_canonical(HeldTensors(held), links, shapes)
    return {name: ours.read(name, entry.box) for name, entry in ours.entries.items()}


def _apart(name: str, gradient: Tensor, architecture: str) -> dict[str, Tensor]:
    """Undo what transformers does to names and experts when it reads a file: it fuses the experts of a layer."""
    if architecture == "gpt_neox":
        name = name.replace("lm_head", "embed_out")
    if architecture == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    else:
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return {name: gradient}
    return {
        f"{prefix}.{expert}.{part}.weight": matrix
        for expert, fused in enumerate(gradient)
        for part, matrix in zip(parts[kind], fused.chunk(len(parts[kind])), strict=True)
    }
