"""Small parts of training: schedule, dropout, initial weights, layers of stages, estimate, metrics, pickles."""

import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_cases import tiny_config

from contracts.errors import ConfigError, InputError
from training.config import ModelConfig, OptimizerConfig, PretrainConfig
from training.dropout import Dropout
from training.estimate import estimate
from training.flops import active_parameter_count, parameter_count, step_flops_per_token
from training.initialization import initial_tensor
from training.mesh import TensorParallel
from training.metrics import LastLine, MetricsWriter, cut, read
from training.model_config import MoeConfig
from training.parameters import stored_parameters
from training.pipeline_split import stage_layers
from training.safe_pickle import read_dcp_metadata
from training.schedules import Schedule


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    schedule = Schedule(OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=10), 110)

    assert [schedule.learning_rate(step) for step in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert schedule.learning_rate(60) == pytest.approx(0.55)
    assert schedule.learning_rate(110) == 0.1
    assert schedule.learning_rate(500) == 0.1


def test_layers_are_dealt_evenly_and_in_order() -> None:
    stages = [stage_layers(7, 3, stage) for stage in range(3)]

    assert [list(layers) for layers in stages] == [[0, 1, 2], [3, 4], [5, 6]]


def test_dropout_keeps_the_share_and_does_not_depend_on_how_rows_are_grouped() -> None:
    drop = Dropout(0.3, seed=5)
    x = torch.ones(64, 8, 32)
    ids = torch.arange(100, 108)

    whole = drop(x, ids, 3)
    parts = torch.cat([drop(x[:, :2], ids[:2], 3), drop(x[:, 2:], ids[2:], 3)], dim=1)

    assert torch.equal(whole, parts)
    assert (whole == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert whole.max().item() == pytest.approx(1 / 0.7)
    assert not torch.equal(whole, drop(x, ids, 4))
    assert not torch.equal(whole, drop(x, ids + 8, 3))
    halves = [Dropout(0.3, 5, part)(x[:32], ids, 3) for part in (0, 1)]
    assert torch.equal(whole, torch.cat(halves))


def test_initial_weights_follow_from_seed_and_name_alone() -> None:
    model = tiny_config("gpt2").model
    first = initial_tensor("layers.0.attn.qkv.weight", (96, 32), model, 1)

    assert torch.equal(first, initial_tensor("layers.0.attn.qkv.weight", (96, 32), model, 1))
    assert not torch.equal(first, initial_tensor("layers.1.attn.qkv.weight", (96, 32), model, 1))
    assert not torch.equal(first, initial_tensor("layers.0.attn.qkv.weight", (96, 32), model, 2))
    assert initial_tensor("layers.0.attn.out.weight", (512, 512), model, 1).std().item() == pytest.approx(
        0.01, rel=0.02
    )
    assert initial_tensor("layers.0.mlp.norm.weight", (4,), model, 1).tolist() == [1.0] * 4
    assert initial_tensor("layers.0.mlp.norm.bias", (4,), model, 1).tolist() == [0.0] * 4


REFERENCE = {
    "num_layers": 6,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "vocab_size": 8192,
}


def test_the_reference_work_counts_what_the_facts_say() -> None:
    model = ModelConfig.model_validate(REFERENCE)

    assert parameter_count(model) == pytest.approx(14.0e6, rel=2e-3)
    assert step_flops_per_token(model, 512) * 4 * 512 == pytest.approx(198.1e9, rel=1e-3)


def test_of_experts_only_those_count_that_a_token_meets_and_of_scores_those_in_the_window() -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 128}
    dense = ModelConfig.model_validate({"family": "llama", **sizes})
    expert = 3 * 64 * 96

    sparse = dense.model_copy(update={"moe": MoeConfig(num_experts=8, top_k=2, layer_interval=2)})
    assert parameter_count(sparse) == parameter_count(dense) + 7 * expert + 8 * 64
    assert active_parameter_count(sparse) == parameter_count(dense) + expert + 8 * 64
    assert step_flops_per_token(sparse, 32) == step_flops_per_token(dense, 32) + 6 * (expert + 8 * 64)

    window = dense.model_copy(update={"sliding_window": 8})
    assert step_flops_per_token(window, 32) == step_flops_per_token(dense, 8)


def test_the_estimate_adds_up() -> None:
    config = PretrainConfig.model_validate({"model": REFERENCE, "layout": {"pipeline_parallel": 2}})
    found = estimate(config)
    untied = stored_parameters(config.model)
    halves = [0, 0]
    for name, (shape, _) in untied.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        stage = (0 if name.startswith("embedding") else 1) if layer is None else layer // 3
        halves[stage] += math.prod(shape)
    halves[1] += 8192 * 384  # the last stage's copy of the tied table

    assert found.parameters_per_rank == max(halves)
    assert found.bubble == pytest.approx(1 / 5)
    assert found.tokens == 100 * 16 * 512
    assert found.num_ranks == 2
    assert found.checkpoint_bytes == 12 * found.parameters
    assert found.memory_per_rank_bytes == found.as_data()["memory_per_rank_bytes"]
    assert "pipeline bubble" in found.as_lines()
    sharded = PretrainConfig.model_validate({"model": REFERENCE, "layout": {"data_parallel": 4}})
    copied = PretrainConfig.model_validate({"model": REFERENCE, "layout": {"data_parallel": 4, "shard": "none"}})
    assert estimate(sharded).optimizer_bytes * 4 == pytest.approx(estimate(copied).optimizer_bytes, rel=1e-6)
    long = PretrainConfig.model_validate({"model": REFERENCE, "layout": {"context_parallel": 4}})
    # A chunk of logits and the gradient of the table stay what they are.
    assert estimate(long).activations_bytes < estimate(sharded).activations_bytes / 2.5
    assert estimate(long).optimizer_bytes == estimate(sharded).optimizer_bytes


def test_lines_of_steps_done_again_are_cut_and_half_lines_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, after_step=0)
    for step in range(1, 6):
        writer.write(step, loss_nats=1.0 / step)
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')

    cut(path, 3)

    assert [line["step"] for line in read(path)] == [1, 2, 3]
    assert path.read_text().endswith("\n")


def test_the_newest_line_is_followed_through_half_lines_and_cuts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    last = LastLine(path)
    assert last.newest() is None
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert last.newest() == {"step": 2}
    assert last.newest() is None
    with path.open("a") as file:
        file.write('p": 3}\n')
    assert last.newest() == {"step": 3}
    path.write_text('{"step": 1}\n')
    assert last.newest() == {"step": 1}


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch /tmp/never",)


def test_metadata_that_names_a_function_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil()))

    with pytest.raises(InputError, match=r"it names posix\.system, which no checkpoint metadata needs"):
        read_dcp_metadata(tmp_path)


def test_metadata_that_is_missing_means_an_unfinished_save(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no \.metadata, so its save did not finish"):
        read_dcp_metadata(tmp_path)


def test_transformer_engine_that_is_not_there_is_named_with_the_cure() -> None:
    from training.te import transformer_engine

    pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine may have Transformer Engine")
    with pytest.raises(ConfigError, match=r"Install shardline\[te\].* or set model\.backend: local"):
        transformer_engine()


class _RecordedAttention(torch.nn.Module):
    """Stands for Transformer Engine's attention: says what it was asked for."""

    def __init__(self, *_sizes: int, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, q: torch.Tensor, *_: torch.Tensor, **asked: Any) -> torch.Tensor:
        self.asked = asked
        return torch.zeros(*q.shape[:-2], q.shape[-2] * q.shape[-1])


@pytest.mark.parametrize(("family", "mask"), [("gpt2", "causal"), ("bert", "no_mask")])
def test_attention_of_transformer_engine_sees_what_the_family_sees(
    family: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training.te import TransformerEngineBackend

    monkeypatch.setattr(
        "training.te.transformer_engine", lambda: SimpleNamespace(DotProductAttention=_RecordedAttention)
    )
    model = tiny_config(family).model
    backend = TransformerEngineBackend(model, TensorParallel(None, 0, 1, False))
    attention = backend.attention(causal=model.causal)
    q = torch.zeros(6, 2, 4, 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, -1]])

    plain = attention(q, q, q)
    packed = attention(q, q, q, documents)

    assert plain.shape == packed.shape == (6, 2, 32)
    assert attention.core.settings["attn_mask_type"] == mask
    assert attention.core.settings["window_size"] == ((-1, 0) if family == "gpt2" else (-1, -1))
    assert attention.core.asked["attn_mask_type"] == ("padding_causal" if family == "gpt2" else "padding")
    assert attention.core.asked["cu_seqlens_q"].tolist() == [0, 3, 6, 11, 12]


def test_settings_survive_a_round_trip_through_json() -> None:
    config = tiny_config("llama", (2, 2, 1))

    assert PretrainConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config
