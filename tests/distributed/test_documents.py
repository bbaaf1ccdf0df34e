"""Rows of several documents whose bounds the model keeps: each document is seen as if it stood alone (TRN-42)."""

from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor
from training_cases import DOCUMENT_LENGTHS as LENGTHS
from training_cases import SEQ_LENGTH, DocumentSource, new_trainer, relative_difference, tiny_config

Layout = tuple[int, int, int]
FAMILIES = {
    "gpt2": {},
    "llama": {},
    "mistral": {"sliding_window": 5},
}
LAYOUTS: list[Layout] = [(2, 1, 1), (1, 2, 1), (2, 2, 2)]


def _train(names: list[str], layout: Layout, more: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for name in names:
        trainer = new_trainer(tiny_config(name, layout, model=dict(FAMILIES[name]), train_steps=4, **more))
        results = [trainer.train_step(DocumentSource()) for _ in range(4)]
        found[name] = [(r.loss_nats, r.gradient_norm) for r in results]
    return found


@pytest.fixture(scope="module")
def reference() -> dict[str, list[tuple[float, float]]]:
    return run_on_ranks(1, _train, list(FAMILIES), (1, 1, 1), {})[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_of_documents_train_alike_at_every_layout(
    layout: Layout, reference: dict[str, list[tuple[float, float]]]
) -> None:
    more = {"recompute": "full"} if layout == (2, 2, 2) else {}

    found = run_on_ranks(int(np.prod(layout)), _train, list(FAMILIES), layout, more)[0]

    for name in FAMILIES:
        assert relative_difference(found[name], reference[name]) < 1e-12, name


def test_selective_recomputation_keeps_the_bounds(reference: dict[str, list[tuple[float, float]]]) -> None:
    found = run_on_ranks(1, _train, list(FAMILIES), (1, 1, 1), {"recompute": "selective"})[0]

    for name in FAMILIES:
        assert relative_difference(found[name], reference[name]) < 1e-12, name


def _logits(family: str) -> tuple[Tensor, list[Tensor]]:
    stage = new_trainer(tiny_config(family, model=dict(FAMILIES[family]))).stages[0]
    row = {name: torch.from_numpy(array) for name, array in DocumentSource().rows([0]).items()}
    tokens, documents, positions = row["inputs"], row["documents"], row["positions"]
    with torch.no_grad():
        together = stage(tokens, positions=positions, documents=documents, want="logits")
        alone = [stage(part, want="logits")[0] for part in tokens.split(LENGTHS, dim=1)]
    return together[0], alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_has_the_logits_that_it_has_alone(family: str) -> None:
    together, alone = run_on_ranks(1, _logits, family)[0]

    assert sum(LENGTHS) == SEQ_LENGTH
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)
