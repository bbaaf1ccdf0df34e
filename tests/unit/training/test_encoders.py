"""BERT, RoBERTa and T5 against transformers' models from the same weights: logits, and every parameter's gradient."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from encoder_cases import ENCODERS, T5S, encoder_batch, reference_gradients, reference_of, t5_batch
from reference_models import batch_gradients, put_weights, random_weights
from torch import Tensor
from training_cases import new_trainer, tiny_config

from training.config import IGNORE_INDEX
from training.data import Batch
from training.mesh import init_single_rank
from training.model_config import ModelConfig
from training.scoring import Scorer

pytest.importorskip("transformers", reason="the reference models are in the dev extra")


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    init_single_rank()
    yield
    dist.destroy_process_group()


def _ours(family: str, changes: dict[str, Any]) -> tuple[ModelConfig, dict[str, Tensor], Any]:
    config = tiny_config(family, precision="float32", global_batch_size=4, model=changes)
    weights = random_weights(config.model)
    if not config.model.scales_scores:  # undivided scores of weights as large as these magnify rounding
        weights = {name: w * 0.5 if name.endswith((".qkv.weight", ".q.weight")) else w for name, w in weights.items()}
    trainer = new_trainer(config)
    put_weights(trainer, weights)
    return config.model, weights, trainer


def _assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        assert gradient.abs().max() > 0, key
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-4, atol=1e-6, msg=lambda text, k=key: f"{k}: {text}")


def _assert_same_logits(trainer: Any, batch: Batch, logits: Tensor, seen: Tensor) -> None:
    told = {name: value for name, value in batch.context.items() if not name.startswith("pair_")}
    ours = Scorer(trainer.stages, trainer.mesh).logits(batch.inputs, told)
    torch.testing.assert_close(ours[seen], logits[seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_the_logits_and_gradients_of_transformers(name: str) -> None:
    model, weights, trainer = _ours(*ENCODERS[name])
    batch = encoder_batch(model, 4, 32)
    num_tokens = int((batch.labels != IGNORE_INDEX).sum())
    context = dict(batch.context)
    if model.pair_head:
        context["pair_weights"] = torch.full((4,), num_tokens / 4)
    ours = batch_gradients(trainer, replace(batch, context=context), num_tokens)

    reference = reference_of(model, weights)
    mask = (batch.context["documents"] == 0).long()
    types = {"token_type_ids": batch.context["token_types"]} if "token_types" in batch.context else {}
    out = reference(batch.inputs, attention_mask=mask, **types)
    logits = out.prediction_logits if model.pair_head else out.logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    if model.pair_head:
        loss = loss + F.cross_entropy(out.seq_relationship_logits, batch.context["pair_labels"])
    loss.backward()

    _assert_same_logits(trainer, batch, logits, mask == 1)
    _assert_equal(ours, reference_gradients(reference, model))


@pytest.mark.parametrize("name", T5S)
def test_an_encoder_with_a_decoder_has_the_logits_and_gradients_of_transformers(name: str) -> None:
    model, weights, trainer = _ours(*T5S[name])
    batch = t5_batch(model, 4, 32, 16)
    ours = batch_gradients(trainer, batch, int((batch.labels != IGNORE_INDEX).sum()))

    reference = reference_of(model, weights)
    mask = (batch.context["documents"] == 0).long()
    reference.config.scale_decoder_outputs = model.tied_embeddings
    logits = reference(
        batch.inputs, attention_mask=mask, decoder_input_ids=batch.context["decoder_inputs"], use_cache=False
    ).logits
    F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()

    _assert_same_logits(trainer, batch, logits, torch.ones_like(batch.labels, dtype=torch.bool))
    _assert_equal(ours, reference_gradients(reference, model))
