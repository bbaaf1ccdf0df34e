"""Tiny models, layouts and data that the training tests share."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from training.config import IGNORE_INDEX, PretrainConfig
from training.mesh import build_mesh
from training.rows import positions_in_runs
from training.trainer import Trainer

SEQ_LENGTH = 32
DOCUMENT_LENGTHS = [7, 1, 14, 10]
VOCAB = 100  # not a multiple of 128, so every model here has padding rows


class PatternSource:
    """Rows that a model can learn something of: squares modulo the vocabulary, fixed by the sample's number."""

    def tokens(self, sample_ids: Any) -> Any:
        return np.stack([_row(int(n)) for n in sample_ids])


class DocumentSource(PatternSource):
    """Rows of four documents each, at other places in every row; labels do not cross a bound."""

    def rows(self, sample_ids: Any) -> dict[str, Any]:
        tokens = self.tokens(sample_ids)
        numbers = np.stack([_document_numbers(int(sample)) for sample in sample_ids])
        labels = tokens[:, 1:].copy()
        labels[numbers[:, 1:] != numbers[:, :-1]] = IGNORE_INDEX
        numbers = np.ascontiguousarray(numbers[:, :-1])
        return {
            "inputs": tokens[:, :-1],
            "labels": labels,
            "positions": positions_in_runs(numbers),
            "documents": numbers,
        }


def _document_numbers(sample: int) -> Any:
    lengths = np.roll(DOCUMENT_LENGTHS, sample)
    return np.append(np.repeat(np.arange(4), lengths), 3)


def _row(sample_id: int) -> Any:
    return np.random.default_rng(sample_id).integers(0, 30, SEQ_LENGTH + 1) ** 2 % VOCAB


def tiny_config(family: str, layout: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> PretrainConfig:
    """Settings of a model of two layers; `layout` is (tensor, pipeline, data) parallel.

    `changes` replaces top-level settings; keys of `model`, `layout_more` and `optimizer` are added to theirs.
    """
    tp, pp, dp = layout
    model = {
        "family": family,
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": SEQ_LENGTH,
        **({"num_query_groups": 2} if family == "llama" else {}),
        **changes.pop("model", {}),
    }
    degrees = {"tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": dp, **changes.pop("layout_more", {})}
    optimizer = {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2, "clip_grad": 0.5, **changes.pop("optimizer", {})}
    settings = {
        "seq_length": SEQ_LENGTH,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_steps": 10,
        "precision": "float64",
        **changes,
    }
    return PretrainConfig.model_validate({"model": model, "layout": degrees, "optimizer": optimizer, **settings})


def curve(trainer: Trainer, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the next `steps` steps."""
    source = PatternSource()
    results = [trainer.train_step(source) for _ in range(steps)]
    return [(r.loss_nats, r.gradient_norm) for r in results]


def new_trainer(config: PretrainConfig) -> Trainer:
    return Trainer(config, build_mesh(config.layout))


def relative_difference(a: Iterable[Any], b: Iterable[Any]) -> float:
    return float(np.abs(np.array(list(a)) / np.array(list(b)) - 1.0).max())
