"""The layers against transformers' models from the same weights: logits and the gradient of every parameter."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference_models import (
    FAMILIES,
    fill,
    gradients_of,
    outside_links,
    put_weights,
    random_weights,
    transformers_gradients,
    transformers_model,
)
from torch import Tensor
from training_cases import PatternSource, new_trainer, tiny_config

from conversion.huggingface_architecture import Architecture
from training.config import PretrainConfig
from training.mesh import init_single_rank
from training.model_config import ModelConfig
from training.scoring import Scorer

pytest.importorskip("transformers", reason="the reference models are in the dev extra")


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    init_single_rank()
    yield
    dist.destroy_process_group()


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(PatternSource().tokens(range(4)))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    inputs, labels = _batch()
    config = tiny_config(family, precision="float32", global_batch_size=4, model=changes)
    weights = random_weights(config.model)
    ours, our_gradients = _ours(config, weights)

    reference = transformers_model(config.model, weights, tmp_path)
    has_experts = config.model.moe is not None
    out = reference(inputs, **({"output_router_logits": True} if has_experts else {}))
    loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    if has_experts:
        loss = loss + _balance(out.router_logits, config.model, len(inputs))
    loss.backward()

    torch.testing.assert_close(ours, out.logits, rtol=0, atol=1e-5)
    _assert_equal(our_gradients, transformers_gradients(reference, config.model))


def _ours(config: PretrainConfig, weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Our logits, and the gradients of the mean loss."""
    inputs, labels = _batch()
    trainer = new_trainer(config)
    put_weights(trainer, weights)
    return Scorer(trainer.stages, trainer.mesh).logits(inputs), gradients_of(trainer, inputs, labels)


def _assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        assert gradient.abs().max() > 0, key
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-4, atol=1e-6, msg=lambda text, k=key: f"{k}: {text}")


def _openai_gpt() -> Any:
    """Post-norm."""
    import transformers

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    settings = transformers.OpenAIGPTConfig(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=4, **off)
    return transformers.OpenAIGPTLMHeadModel(settings)


_SIZES = {
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}


def _phi() -> Any:
    """One norm for attention and MLP."""
    import transformers

    return transformers.PhiForCausalLM(transformers.PhiConfig(**_SIZES, attention_dropout=0.0))


def _granite() -> Any:
    """Scaled embeddings."""
    import transformers

    settings = transformers.GraniteConfig(
        **_SIZES, rms_norm_eps=1e-5, embedding_multiplier=4.0, attention_multiplier=8**-0.5
    )
    return transformers.GraniteForCausalLM(settings)


PHI_NAMES = {
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "o_proj": "dense",
    "model.norm": "model.final_layernorm",
}
PHI = {"shared_norm": True, "rotary_percent": 0.5, "activation": "gelu_tanh", "num_query_groups": 2}


@pytest.mark.parametrize(
    ("family", "changes", "make", "like", "renames"),
    [
        ("gpt2", {"norm_position": "post"}, _openai_gpt, "gpt2", {"wte": "tokens_embed", "wpe": "positions_embed"}),
        ("neox", PHI, _phi, "llama", PHI_NAMES),
        ("llama", {"embedding_scale": 4.0, "ffn_hidden_size": 128}, _granite, "llama", {}),
    ],
    ids=["post-norm", "one norm for both", "scaled embedding"],
)
def test_choices_that_no_family_makes_equal_models_of_transformers_that_make_them(
    family: str, changes: dict[str, Any], make: Callable[[], Any], like: Architecture, renames: dict[str, str]
) -> None:
    inputs, labels = _batch()
    config = tiny_config(family, precision="float32", global_batch_size=4, model=changes)
    weights = random_weights(config.model)
    ours, our_gradients = _ours(config, weights)

    reference, links = make().train(), outside_links(config.model, like, renames)
    fill(reference, weights, links)
    logits = reference(inputs).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5)
    _assert_equal(our_gradients, transformers_gradients(reference, config.model, links))


def _balance(router_logits: tuple[Tensor, ...], model: ModelConfig, rows: int) -> Tensor:
    """The balance loss of transformers for each layer and row on its own, averaged."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    moe = model.moe
    assert moe is not None and len(router_logits) == sum(model.has_experts(n) for n in range(model.num_layers))
    losses = [
        load_balancing_loss_func((row,), moe.num_experts, moe.top_k)
        for layer in router_logits
        for row in layer.view(rows, -1, moe.num_experts)
    ]
    return moe.aux_loss_coef * torch.stack(losses).mean()
