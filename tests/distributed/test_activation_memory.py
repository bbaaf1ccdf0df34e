"""What the estimate says that a block keeps for backward is what autograd saves."""

from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from training_cases import new_trainer, tiny_config

from training.activation_memory import activations_bytes
from training.config import PretrainConfig

ROWS, LENGTH = 4, 64
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 96}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2, dropout": ("gpt2", {"dropout": 0.1}),
    "llama": ("llama", {"num_query_groups": 4}),
    "llama, grouped": ("llama", {"num_query_groups": 2}),
    "qwen3": ("qwen3", {"num_query_groups": 4, "head_dim": 48}),
    "mixtral": ("mixtral", {"num_query_groups": 2, "moe": EXPERTS}),
}


def _config(case: str, num_layers: int, changes: dict[str, Any]) -> PretrainConfig:
    family, model = CASES[case]
    sizes = {"hidden_size": 128, "max_position_embeddings": LENGTH, "vocab_multiple": 2, "num_layers": num_layers}
    more = {"seq_length": LENGTH, "micro_batch_size": ROWS, "precision": "float32", **changes}
    layout = (changes.get("tp", 1), 1, 1)
    return tiny_config(family, layout, model={**sizes, **model}, **{k: v for k, v in more.items() if k != "tp"})


def _saved_bytes(config: PretrainConfig) -> int:
    """Bytes of the storages that one forward pass leaves to autograd, parameters left out."""
    trainer = new_trainer(config)
    stage = trainer.stages[0]
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            held[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage(tokens, labels=tokens, row_ids=torch.arange(ROWS))
    weights = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
    return sum(tensor.untyped_storage().nbytes() for key, tensor in held.items() if key not in weights)


def _per_layer(case: str, changes: dict[str, Any]) -> tuple[float, float]:
    """Bytes of two more layers, found and estimated."""
    one, three = (_config(case, number, changes) for number in (1, 3))
    found = _saved_bytes(three) - _saved_bytes(one)
    return found, activations_bytes(three, 0, 4) - activations_bytes(one, 0, 4)


def _all(changes: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {case: _per_layer(case, changes) for case in CASES}


@pytest.mark.parametrize(
    "changes",
    [{}, {"recompute": "full"}, {"tp": 2}, {"tp": 2, "layout_more": {"sequence_parallel": False}}],
    ids=str,
)
def test_a_block_keeps_what_the_estimate_says(changes: dict[str, Any]) -> None:
    for case, (found, estimated) in run_on_ranks(changes.get("tp", 1), _all, changes)[0].items():
        assert estimated == pytest.approx(found, rel=0.08), case
