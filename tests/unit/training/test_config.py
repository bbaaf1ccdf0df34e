"""Settings of a training run: what is refused, and what the message says to do."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from contracts.configuration import identity, validated
from contracts.documents import Document, load_yaml, parse_yaml
from contracts.errors import ConfigError
from training.config import ModelConfig, PretrainConfig, with_vocab_size

CASE = Path(__file__).parents[2] / "cases" / "TRN-45" / "train.yaml"


def _settings(**changes: Any) -> PretrainConfig:
    return validated(PretrainConfig, Document(changes, "run.yaml"))


def _message(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        _settings(**changes)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_family_llama_means_its_own_layers_and_single_fields_override_it() -> None:
    model = ModelConfig.model_validate({"family": "llama", "hidden_size": 256, "tied_embeddings": True})

    assert (model.norm, model.activation, model.position) == ("rmsnorm", "swiglu", "rope")
    assert not model.linear_bias
    assert model.tied_embeddings
    assert model.ffn_hidden_size == 704  # 8/3 of 256 is 682.7; the next multiple of 64


def test_degrees_that_do_not_divide_are_refused_with_the_nearest_that_do() -> None:
    model = {"num_attention_heads": 6, "hidden_size": 384}
    assert _message(model=model, layout={"tensor_parallel": 4}) == (
        "run.yaml: model.num_attention_heads (6) / layout.tensor_parallel (4) leaves a remainder of 2. "
        "Nearest tensor_parallel: 3 or 6."
    )
    groups = {**model, "num_query_groups": 2}
    assert "model.num_query_groups (2) / layout.tensor_parallel (3)" in _message(
        model=groups, layout={"tensor_parallel": 3}
    )
    ffn = {**model, "ffn_hidden_size": 1000}
    assert "model.ffn_hidden_size (1000) / layout.tensor_parallel (3) leaves a remainder of 1" in _message(
        model=ffn, layout={"tensor_parallel": 3}
    )


def test_heads_must_divide_the_width_and_groups_the_heads() -> None:
    text = _message(model={"hidden_size": 256, "num_attention_heads": 6})
    assert (
        "hidden_size (256) / num_attention_heads (6) leaves a remainder of 4. Nearest num_attention_heads: 4 or 8"
        in text
    )
    text = _message(model={"num_attention_heads": 8, "num_query_groups": 3})
    assert "Nearest num_query_groups: 2 or 4." in text


def test_a_stage_needs_a_layer() -> None:
    text = _message(model={"num_layers": 2}, layout={"pipeline_parallel": 4})
    assert "model.num_layers (2) is below layout.pipeline_parallel (4)" in text


def test_batch_arithmetic_names_the_nearest_legal_batches() -> None:
    assert _message(global_batch_size=10, micro_batch_size=4, layout={"data_parallel": 2}) == (
        "run.yaml: global_batch_size (10) / (micro_batch_size (4) x layout.data_parallel (2) = 8) "
        "leaves a remainder of 2. Nearest global_batch_size: 8 or 16; or change micro_batch_size."
    )


def test_a_pipeline_needs_as_many_micro_batches_as_stages() -> None:
    text = _message(global_batch_size=4, micro_batch_size=4, layout={"pipeline_parallel": 2})
    assert "gives 1 micro-batches, and layout.pipeline_parallel (2) needs at least 2. Use global_batch_size 8" in text


def test_the_padded_vocabulary_must_divide() -> None:
    model = {"vocab_size": 1000, "num_attention_heads": 3, "hidden_size": 384}
    text = _message(model=model, layout={"tensor_parallel": 3})
    assert "padded to a multiple of 128 is 1024, not divisible by layout.tensor_parallel (3)" in text
    assert "Set model.vocab_multiple: 384." in text
    assert ModelConfig.model_validate({**model, "vocab_multiple": 384}).padded_vocab_size == 1152


def test_a_vocabulary_that_comes_from_the_data_is_checked_too() -> None:
    settings = _settings(
        model={"num_attention_heads": 3, "hidden_size": 384}, layout={"tensor_parallel": 3}, seq_length=510
    )
    with pytest.raises(ValueError, match=r"vocab_multiple: 384"):
        with_vocab_size(settings, 1000)
    assert with_vocab_size(_settings(), 1000).model.vocab_size == 1000


def test_sequences_are_cut_evenly_and_fit_the_positions() -> None:
    text = _message(seq_length=511, layout={"tensor_parallel": 2})
    assert "Nearest seq_length: 510 or 512; or set layout.sequence_parallel: false." in text
    assert "seq_length (2048) is above model.max_position_embeddings (1024)" in _message(seq_length=2048)


def test_gated_matrices_are_shared_by_columns() -> None:
    text = _message(model={"family": "llama", "hidden_size": 256}, layout={"data_parallel": 3}, global_batch_size=12)
    assert "model.hidden_size (256) / layout.data_parallel (3)" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"layout": {"context_parallel": 4}, "seq_length": 510},
            "seq_length (510) is no multiple of 8: layout.context_parallel (4) gives each rank two of 8 equal chunks. "
            "Nearest seq_length: 504 or 512.",
        ),
        (
            {"layout": {"context_parallel": 2, "tensor_parallel": 4}, "seq_length": 100},
            "and each rank's part is cut over layout.tensor_parallel (4). Nearest seq_length: 96 or 104.",
        ),
        (
            {"layout": {"data_parallel": 2, "context_parallel": 3, "shard_ranks": 4}},
            "layout.data_parallel (2) x layout.context_parallel (3) = 6 / shard_ranks (4) leaves a remainder of 2. "
            "Nearest shard_ranks: 3 or 6.",
        ),
        ({"layout": {"data_parallel": 2, "shard": "none", "shard_ranks": 2}}, "shard_ranks (2) share nothing"),
        (
            {"layout": {"pipeline_parallel": 2, "schedule": "zero_bubble", "shard": "parameters"}},
            "Use shard: optimizer, or schedule: 1f1b.",
        ),
        ({"layout": {"data_parallel": 2, "expert_parallel": 2}}, "deals experts, and the model has none. Use 1"),
        (
            {"layout": {"data_parallel": 4, "expert_parallel": 3}},
            "layout.data_parallel (4) = 4 / expert_parallel (3) leaves a remainder of 1. "
            "Nearest expert_parallel: 2 or 4.",
        ),
        (
            {"layout": {"data_parallel": 12, "shard_ranks": 3, "expert_parallel": 2}},
            "shard_ranks (3) and expert_parallel (2): one must be a multiple of the other. "
            "Nearest expert_parallel: 1 or 3.",
        ),
        (
            {
                "model": {"linear_bias": False, "moe": {"num_experts": 6}},
                "layout": {"data_parallel": 4, "expert_parallel": 4},
            },
            "model.moe.num_experts (6) / layout.expert_parallel (4) leaves a remainder of 2. "
            "Nearest expert_parallel: 3 or 6.",
        ),
        (
            {
                "model": {"family": "llama", "hidden_size": 256},
                "layout": {"data_parallel": 3, "context_parallel": 2, "shard_ranks": 3},
                "micro_batch_size": 1,
                "global_batch_size": 12,
            },
            "model.hidden_size (256) / layout.shard_ranks (3) leaves a remainder of 1",
        ),
        ({"layout": {"virtual_pipeline": 2}}, "Use virtual_pipeline: 1, or pipeline_parallel: 2 or more"),
        ({"optimizer": {"lr": 1e-4, "min_lr": 1e-3}}, "min_lr (0.001) is above lr (0.0001)"),
        ({"optimizer": {"warmup_steps": 100}}, "Use at most 99."),
        ({"model": {"activation": "swiglu"}}, "swiglu goes with linear_bias: false"),
        ({"layout": {"tensor_paralel": 2}}, "unknown setting layout.tensor_paralel. Did you mean tensor_parallel?"),
        ({"split": "1,-1"}, "negative weight"),
    ],
)
def test_other_mistakes_say_what_to_do(changes: dict[str, Any], expected: str) -> None:
    assert expected in _message(**changes)


def test_what_cannot_change_the_result_is_no_part_of_the_identity() -> None:
    base = identity(_settings())
    changed = _settings(
        layout={"data_parallel": 2, "shard": "none", "sequence_parallel": False},
        micro_batch_size=1,
        recompute="full",
        log_interval=7,
        checkpoint_interval=3,
        keep_last=9,
        threads_per_rank=1,
        datasets=["a"],
        timeout_s=5,
    )
    assert identity(changed) == base
    assert identity(_settings(layout={"tensor_parallel": 2})) != base
    assert identity(_settings(layout={"pipeline_parallel": 2})) != base
    assert identity(_settings(global_batch_size=32)) != base


def _case(**replaced: str) -> Document:
    """The users' file of TRN-45, as settings of a run; `replaced` gives values as they stand in YAML."""
    text = CASE.read_text(encoding="utf-8")
    for key, value in replaced.items():
        text = "\n".join(f"{key}: {value}" if line.startswith(f"{key}:") else line for line in text.splitlines())
    data = parse_yaml(text, str(CASE)).data
    optimizer = {"lr": "lr", "min_lr": "min_lr", "weight_decay": "weight_decay", "clip_grad": "clip_grad"}
    optimizer |= {"warmup_steps": "warmup_iters", "beta2": "adam_beta2"}
    top = {"train_steps": "train_iters", "seed": "seed", "checkpoint_interval": "eval_interval"}
    settings = {ours: data[theirs] for ours, theirs in top.items()}
    return Document({**settings, "optimizer": {ours: data[theirs] for ours, theirs in optimizer.items()}}, str(CASE))


def test_trn_45_a_leading_zero_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"warmup_iters is 010; a leading zero .* Write 10, or 0o10"):
        load_yaml(CASE)


def test_trn_45_a_decimal_comma_is_an_error_that_names_key_value_and_type() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.beta2 is '0,95' \(text\): Input should be a valid number"):
        validated(PretrainConfig, _case(warmup_iters="8"))


def test_trn_45_the_other_numbers_are_what_their_writers_meant() -> None:
    settings = validated(PretrainConfig, _case(warmup_iters="8", adam_beta2="0.95"))

    optimizer = settings.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.weight_decay) == (1e-4, 1e-5, 0.1)
    assert (settings.train_steps, settings.seed, settings.checkpoint_interval) == (1000, 1234, 100)
    assert (optimizer.warmup_steps, optimizer.clip_grad, optimizer.beta2) == (8, 1.0, 0.95)
    assert all(isinstance(value, float) for value in (optimizer.lr, optimizer.clip_grad, optimizer.beta2))
    assert isinstance(settings.train_steps, int)
    assert yaml.safe_load("lr: 1e-4")["lr"] == "1e-4"  # what the plain reader would have made of it


def test_a_family_of_a_wrong_type_is_a_wrong_setting() -> None:
    with pytest.raises(ValidationError, match="Input should be 'gpt2', 'llama', 'mistral'"):
        ModelConfig.model_validate({"family": ["gpt2"]})


def test_layers_to_recompute_are_named_and_exist() -> None:
    assert _settings(recompute="full", recompute_layers=[0, 1]).recompute_of(1) == "full"
    assert _settings(recompute="full", recompute_layers=[0]).recompute_of(1) == "none"
    assert "Set it too" in _message(recompute_layers=[0])
    assert "there is no layer 99; they are numbered 0 to" in _message(recompute="full", recompute_layers=[99])
