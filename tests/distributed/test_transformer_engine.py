"""The `te` backend's wiring against the `local` one, on stand-ins for Transformer Engine's modules (no GPU here)."""

from typing import Any

import numpy as np
import pytest
from ranks import run_on_ranks
from training_cases import DocumentSource, PatternSource, new_trainer, relative_difference, tiny_config

from training.config import PretrainConfig

Layout = tuple[int, int, int]
Found = dict[str, list[tuple[float, float]]]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("gpt2", {}, {}),
    "llama": ("llama", {}, {"recompute": "full"}),
    "qwen3": ("qwen3", {"num_query_groups": 2}, {}),
    "neox": ("neox", {}, {}),
    "mistral": ("mistral", {"sliding_window": 5}, {}),
    "documents": ("llama", {}, {}),
}


def _train(layout: Layout, backend: str) -> Found:
    import fake_transformer_engine

    if backend == "te":
        fake_transformer_engine.install()
    found = {}
    for name, (family, model, more) in CASES.items():
        config = tiny_config(family, layout, model={**model, "backend": backend}, train_steps=3, **more)
        trainer = new_trainer(config)
        source: Any = DocumentSource() if name == "documents" else PatternSource()
        results = [trainer.train_step(source) for _ in range(3)]
        found[name] = [(r.loss_nats, r.gradient_norm) for r in results]
    return found


@pytest.fixture(scope="module")
def local() -> Found:
    return run_on_ranks(1, _train, (1, 1, 1), "local")[0]


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (2, 2, 2)], ids=str)
def test_layers_of_transformer_engine_stand_where_ours_do(layout: Layout, local: Found) -> None:
    found = run_on_ranks(int(np.prod(layout)), _train, layout, "te")[0]

    for name in CASES:
        assert relative_difference(found[name], local[name]) < 1e-12, name


def _products_in_8_bits(recompute: str) -> tuple[int, set[str]]:
    import fake_transformer_engine

    fake_transformer_engine.install()
    model = {"backend": "te", "hidden_size": 64, "ffn_hidden_size": 64}
    more = {"precision": "bf16", "fp8": "current_scaling", "recompute": recompute, "global_batch_size": 2}
    trainer = new_trainer(tiny_config("gpt2", model=model, **more))
    trainer.train_step(PatternSource())
    return len(fake_transformer_engine.in_8_bits), set(fake_transformer_engine.in_8_bits)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 1), ("full", 2)])
def test_products_of_blocks_run_in_8_bits_also_where_they_are_computed_again(recompute: str, passes: int) -> None:
    products, recipes = run_on_ranks(1, _products_in_8_bits, recompute)[0]

    assert products == 2 * 4 * passes  # two layers of four products
    assert recipes == {"Float8CurrentScaling"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp8": "mxfp8"}, "needs model.backend: te and precision: bf16"),
        ({"fp8": "block_scaling", "precision": "bf16", "model": {"backend": "te"}}, "multiples of 128"),
        (
            {"fp8": "current_scaling", "precision": "bf16", "model": {"backend": "te", "ffn_hidden_size": 72}},
            r"ffn_hidden_size / layout.tensor_parallel is 72. Nearest: 64 or 80",
        ),
    ],
)
def test_products_that_8_bits_cannot_take_are_refused(changes: dict[str, Any], message: str) -> None:
    model = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, **changes.pop("model", {})}
    with pytest.raises(ValueError, match=message):
        PretrainConfig.model_validate({"model": model, "seq_length": 64, **changes})


def test_without_transformer_engine_the_message_says_what_to_do() -> None:
    from contracts.errors import ConfigError
    from training.te import transformer_engine

    with pytest.raises(ConfigError, match=r"Install shardline\[te\]"):
        transformer_engine()
