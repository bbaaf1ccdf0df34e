"""Choices of a model that do not go together, and names that other tools have for them."""

from typing import Any

import pytest

from contracts.configuration import identity, validated
from contracts.documents import Document
from contracts.errors import ConfigError
from training.config import PretrainConfig
from training.model_config import ModelConfig


def _message(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validated(PretrainConfig, Document(changes, "run.yaml"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"family": "neox", "rotary_percent": 0.3, "head_dim": 10}, "head_dim (10) x rotary_percent (0.3) = 3 is odd"),
        ({"family": "neox", "rotary_percent": 0.01}, "= 0 is nothing, and rotary positions turn pairs"),
        ({"rotary_percent": 0.5}, "rope_scaling and rotary_percent need position: rope, and it is learned"),
        ({"shared_norm": True}, "shared_norm: true needs parallel_residual: true"),
        ({"family": "neox", "norm_position": "post"}, "norm_position: post needs parallel_residual: false"),
        ({"activation": "geglu"}, "activation: geglu goes with linear_bias: false"),
        ({"moe": {}}, "moe goes with linear_bias: false"),
        ({"family": "mixtral", "moe": {"top_k": 9}}, "top_k (9) is above num_experts (8). Use at most 8."),
        ({"family": "llama", "rope_scaling": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'"),
        ({"family": "llama", "rope_scaling": {"factor": 0.5}}, "greater than or equal to 1"),
        (
            {"family": "llama", "rope_scaling": {"low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "high_freq_factor (4.0) must be above low_freq_factor (4.0)",
        ),
        ({"family": "mixtral", "moe": {"num_experts_per_tok": 2}}, "Did you mean model.moe.top_k?"),
        ({"family": "neox", "rotary_pct": 0.25}, "Did you mean model.rotary_percent?"),
    ],
)
def test_choices_that_do_not_go_together_are_refused_by_name(model: dict[str, Any], expected: str) -> None:
    assert expected in _message(model=model)


@pytest.mark.parametrize(
    ("moe", "layout", "expected"),
    [
        (
            {"ffn_hidden_size": 33},
            {"tensor_parallel": 2},
            "model.moe.ffn_hidden_size (33) / layout.tensor_par",
        ),
        ({"shared_ffn_hidden_size": 7}, {"tensor_parallel": 2}, "model.moe.shared_ffn_hidden_size (7) / layout.ten"),
        ({"ffn_hidden_size": 36}, {"tensor_parallel": 2, "data_parallel": 4}, "must be divisible by layout.data_par"),
    ],
)
def test_experts_are_cut_evenly(moe: dict[str, Any], layout: dict[str, int], expected: str) -> None:
    assert expected in _message(model={"family": "mixtral", "moe": moe}, layout=layout)


def test_a_family_of_experts_can_be_given_in_part() -> None:
    model = ModelConfig.model_validate({"family": "qwen3_moe", "moe": {"num_experts": 16}})

    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.top_k, model.moe.aux_loss_coef) == (16, 8, 0.001)
    assert model.qk_norm and model.rotary_base == 1e6
    assert [ModelConfig.model_validate({**model.model_dump(), "moe": None}).has_experts(0), model.has_experts(0)] == [
        False,
        True,
    ]


def test_what_a_family_sets_is_part_of_the_identity_and_what_it_leaves_alone_is_not() -> None:
    llama = identity(PretrainConfig.model_validate({"model": {"family": "llama"}}))["model"]
    neox = identity(PretrainConfig.model_validate({"model": {"family": "neox"}}))["model"]

    assert not {"rotary_percent", "parallel_residual", "moe", "sliding_window"} & llama.keys()
    assert (neox["rotary_percent"], neox["parallel_residual"]) == (0.25, True)
