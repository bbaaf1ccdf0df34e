"""Scores rows with a checkpoint of any layout: starts ranks, waits, gathers. No torch in this process."""

import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import ConfigError, InputError
from contracts.json_text import parse_json
from contracts.progress import Progress
from evaluation.rows import Rows, RowScores
from training.config import DeviceSetting, LayoutConfig, ModelConfig, Precision
from training.launch import run_ranks
from training.step_folders import CheckpointInfo, read_info


@dataclass(frozen=True)
class Job:
    """What the ranks are told.

    Args:
        checkpoint: Native step folder.
        folder: Holds `rows.npz`; results and logs go here.
        max_length: Longest row.
        averaged: Score with the moving average of the weights.
    """

    checkpoint: str
    folder: str
    layout: LayoutConfig
    precision: Precision
    device: DeviceSetting
    batch_tokens: int
    max_length: int
    averaged: bool = False
    timeout_s: int = 1800

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "layout": self.layout.model_dump(mode="json")})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        data: dict[str, Any] = parse_json(text)
        data["layout"] = LayoutConfig.model_validate(data["layout"])
        return cls(**data)


def score_rows(
    step_folder: Path,
    rows: Rows,
    *,
    progress: Progress,
    precision: Precision = "float32",
    batch_tokens: int = 8192,
    data_parallel: int = 1,
    threads_per_rank: int = 0,
    device: DeviceSetting = "auto",
    logs: Path | None = None,
    averaged: bool = False,
) -> RowScores:
    """Score rows with the model in a native step folder, at the layout that wrote it.

    Args:
        data_parallel: Copies of the model; the layout's own copies are not needed to score.
        logs: Where the ranks' logs are kept; a temporary folder if None.
        averaged: Score with the moving average of the weights, which the checkpoint must have.

    Raises:
        ConfigError: CUDA is asked for, and there are fewer devices than ranks; or the model is not causal.
        InputError: A row is longer than the model's positions, or holds a token it does not know.
        ShardlineError: A rank failed; the message names its log.
    """
    info = read_info(step_folder)
    model = ModelConfig.model_validate(info.model)
    longest = int(rows.lengths.max()) if len(rows) else 0
    _check(model, rows, longest)
    if not len(rows):
        empty = np.empty(0, np.int64)
        return RowScores(np.empty(0), empty, empty)
    # Each copy holds all of its weights: copies that shared them would wait for each other at every batch, and
    # they need not have equally many.
    # So experts are dealt only to ranks that share rows.
    layout = LayoutConfig.model_validate(info.layout)
    dealt = math.gcd(layout.expert_parallel, layout.context_parallel)
    copies = {"data_parallel": data_parallel, "shard": "none", "shard_ranks": None, "expert_parallel": dealt}
    layout = layout.model_copy(update=copies)
    with tempfile.TemporaryDirectory(prefix="shardline-score-") as folder:
        rows.save(Path(folder) / "rows.npz")
        # Ranks that share a row share it evenly, so it is padded (`sequence_unit`).
        job = Job(
            checkpoint=str(step_folder.resolve()),
            folder=folder,
            layout=_evaluable(layout, longest, model),
            precision=precision,
            device=device,
            batch_tokens=batch_tokens,
            max_length=longest,
            averaged=averaged,
        )
        path = Path(folder) / "job.json"
        path.write_text(job.to_json(), encoding="utf-8")
        run_ranks(
            "evaluation.ranks",
            [str(path)],
            nproc=job.layout.world_size,
            log_dir=logs or Path(folder) / "logs",
            threads_per_rank=threads_per_rank,
            on_poll=lambda: _report(Path(folder) / "progress.json", progress),
            on_note=progress.note,
        )
        return _gather(Path(folder), len(rows))


def _report(path: Path, progress: Progress) -> None:
    try:
        report = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return  # no batch is done yet
    progress.update(report["done"], total=report["total"], unit="rows")


def _evaluable(layout: LayoutConfig, longest: int, model: ModelConfig) -> LayoutConfig:
    """Padding must not go past learned positions; rows then go uncut."""
    unit = layout.sequence_unit
    if model.position != "learned" or -(-longest // unit) * unit <= model.max_position_embeddings:
        return layout
    return layout.model_copy(update={"sequence_parallel": False, "context_parallel": 1, "expert_parallel": 1})


def check_causal(model: ModelConfig) -> None:
    """Check that a model gives probabilities of texts.

    Raises:
        ConfigError: It does not; names its family.
    """
    if not model.causal:
        raise ConfigError(
            f"a model of family {model.family} sees whole rows, so it gives no probability of a text token by token. "
            "Its validation loss stands in the run's metrics (valid_loss_nats); reshape --to huggingface makes it a "
            "folder for fine-tuning."
        )


def _check(model: ModelConfig, rows: Rows, longest: int) -> None:
    check_causal(model)
    if model.position == "learned" and longest > model.max_position_embeddings:
        raise InputError(
            f"a row feeds {longest} tokens, and the model has {model.max_position_embeddings} learned positions. "
            f"Use seq_length {model.max_position_embeddings} or less, or a shorter context."
        )
    highest = int(rows.tokens.max()) if len(rows.tokens) else 0
    if model.vocab_size is not None and highest >= model.vocab_size:
        raise InputError(
            f"the data holds token {highest}, and the model's vocabulary ends at {model.vocab_size - 1}. "
            "The data was tokenized for another model."
        )


def _gather(folder: Path, count: int) -> RowScores:
    log_prob = np.full(count, np.nan)
    scored, greedy = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for path in sorted(folder.glob("scores-*.npz")):
        with np.load(path, allow_pickle=False) as data:
            numbers = data["numbers"].astype(np.int64)
            log_prob[numbers], scored[numbers], greedy[numbers] = data["log_prob"], data["scored"], data["greedy"]
    if np.isnan(log_prob).any():
        number = int(np.flatnonzero(np.isnan(log_prob))[0])
        raise InputError(f"row {number} has no finite log-probability: the weights hold NaN or infinite values.")
    return RowScores(log_prob, scored, greedy)


__all__ = ["CheckpointInfo", "Job", "score_rows"]
