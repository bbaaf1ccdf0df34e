"""The report stage: what a chain measured, as PNG files and one HTML page that needs no other file."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contracts.artifact import Artifact
from contracts.errors import InputError
from contracts.files import write_atomically
from contracts.json_text import parse_json
from contracts.store import Workspace
from evaluation.config import ReportConfig
from evaluation.evaluate import RESULTS
from evaluation.page import image, number, page, table
from evaluation.plots import loss_curve, subset_bars, subset_sizes
from evaluation.report_inputs import Subject, subject_of
from preprocessing.dataset.token_dataset import TokenDataset
from training.metrics import METRICS, read

PAGE = "report.html"


def report(settings: ReportConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Draw the plots and the page.

    Raises:
        ConfigError: There is no checkpoint among the inputs, or one is of a wrong kind.
        InputError: The record of the run or an evaluation is damaged.
    """
    subject = subject_of(inputs, workspace)
    checkpoint, dataset, folder = subject.checkpoint, subject.dataset, workspace.path
    curve = read_curve(subject.run.path / METRICS)
    unigram = unigram_entropy(TokenDataset(dataset.path)) if dataset is not None else None
    plots: list[tuple[str, str]] = []
    if curve:
        loss_curve(folder / "loss.png", [row["step"] for row in curve], losses(curve), unigram=unigram)
        plots.append(("Training loss", "loss.png"))
    results = {name: _result(item) for name, item in subject.evaluations.items()}
    if results and _draw_subsets(folder / "subsets.png", results):
        plots.append(("Held-out bits per byte", "subsets.png"))
    if dataset is not None and (sizes := dataset.summary.get("subsets")):
        subset_sizes(folder / "tokens.png", list(sizes), [counts["tokens"] for counts in sizes.values()])
        plots.append(("Training data", "tokens.png"))
    title = settings.title or checkpoint.name
    facts = _facts(checkpoint, dataset, curve, unigram)
    tables = [table(["fact", "value"], [[key, str(value)] for key, value in facts.items()])]
    tables += [f"<h2>Held-out, per subset: {html.escape(name)}</h2>{_metrics_table(r)}" for name, r in results.items()]
    about = (
        "What was trained, on what, and how it does on the documents of each evaluation. "
        "Intervals are 95 %, over documents."
    )
    body = [tables[0], *(image(name, folder / file) for name, file in plots), *tables[1:]]
    write_atomically(folder / PAGE, page(title, about, body, _sources(subject)))
    summary: dict[str, Any] = {"title": title, "plots": [name for _, name in plots]}
    if curve:
        summary["first_loss_nats"], summary["final_loss_nats"] = losses(curve)[0], final_loss(curve)
    if unigram is not None:
        summary["unigram_entropy_nats"] = unigram
    return summary


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Return the last line of each step that has a loss, in order; [] if there is no such file.

    Raises:
        InputError: A line is damaged.
    """
    rows = {row["step"]: row for row in read(path, is_strict=True) if "loss_nats" in row}
    return [rows[step] for step in sorted(rows)]


def losses(curve: Sequence[Mapping[str, Any]]) -> list[float]:
    """Nats per token, by step."""
    return [float(row["loss_nats"]) for row in curve]


def final_loss(curve: Sequence[Mapping[str, Any]], share: float = 0.05) -> float:
    """Mean loss of the last steps, since one batch's loss is noisy."""
    values = losses(curve)
    return float(np.mean(values[-max(1, round(share * len(values))) :]))


def unigram_entropy(dataset: TokenDataset) -> float:
    """Entropy of the token frequencies of a dataset, in nats per token.

    It is the loss of the best model that ignores all context (Shannon 1948), so a model that has
    learned anything but frequencies is below it.
    """
    counts = np.zeros(0, dtype=np.int64)
    for shard in dataset.shards:
        for start in range(0, shard.num_tokens, 2**24):
            part = np.bincount(shard.tokens[start : start + 2**24])
            size = max(len(counts), len(part))
            counts = np.pad(counts, (0, size - len(counts))) + np.pad(part, (0, size - len(part)))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _result(evaluation: Artifact) -> dict[str, Any]:
    path = evaluation.path / RESULTS
    try:
        result: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(result["metrics"]["subsets"], dict):
            raise ValueError("its subsets are no group")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error}). Run shardline verify on it, and evaluate again.") from error
    return result


def _draw_subsets(path: Path, results: Mapping[str, Mapping[str, Any]]) -> bool:
    names: list[str] = []
    for result in results.values():
        names += [n for n, g in result["metrics"]["subsets"].items() if "bits_per_byte" in g and n not in names]
    groups = {
        model: [result["metrics"]["subsets"].get(name, {}) for name in names] for model, result in results.items()
    }
    complete = {model: found for model, found in groups.items() if all("bits_per_byte" in group for group in found)}
    if not names or not complete:
        return False
    bounds = {m: [(g["bits_per_byte_low"], g["bits_per_byte_high"]) for g in found] for m, found in complete.items()}
    subset_bars(path, names, {m: [g["bits_per_byte"] for g in found] for m, found in complete.items()}, bounds)
    return True


# What the page says of a run; the loss of one last batch is not among it, since readers would quote it.
_FACTS = {
    "parameters": "parameters",
    "step": "optimizer steps",
    "tokens": "tokens trained on",
    "vocab_size": "vocabulary",
    "seq_length": "tokens in a row",
    "valid_loss_nats": "validation loss (nats per token)",
    "tokens_per_s": "tokens per second at the end",
    "matmul_peak_share": "share of the measured matmul peak",
}


def _facts(
    checkpoint: Artifact, dataset: Artifact | None, curve: Sequence[Mapping[str, Any]], unigram: float | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {"checkpoint": checkpoint.name}
    for key, name in _FACTS.items():
        value = checkpoint.summary.get(key)
        if isinstance(value, int | float):
            facts[name] = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    if dataset is not None:
        facts["dataset"] = dataset.name
        facts["dataset tokens"] = f"{dataset.summary.get('tokens', 0):,}"
    if unigram is not None:
        facts["unigram entropy (nats per token)"] = f"{unigram:.4f}"
    if curve:
        facts["final loss (nats per token, mean of the last 5 % of steps)"] = f"{final_loss(curve):.4f}"
    return facts


def _sources(subject: Subject) -> dict[str, Artifact]:
    found = {"checkpoint": subject.checkpoint, "run": subject.run, "dataset": subject.dataset}
    if subject.run is subject.checkpoint:
        del found["run"]
    return {name: item for name, item in found.items() if item is not None} | dict(subject.evaluations)


def _metrics_table(result: Mapping[str, Any]) -> str:
    columns = ("documents", "tokens", "bytes", "loss_nats", "perplexity", "bits_per_byte", "token_accuracy")
    metrics = result["metrics"]
    rows = []
    for name, group in [*metrics["subsets"].items(), ("all", metrics)]:
        interval = ""
        if "bits_per_byte_low" in group:
            interval = f"{group['bits_per_byte_low']:.4f} .. {group['bits_per_byte_high']:.4f}"
        rows.append([name, *(number(group.get(key)) for key in columns), interval])
    how = "".join(
        f"<li>{html.escape(key)}: {html.escape(str(value))}</li>" for key, value in result.get("how", {}).items()
    )
    return table(["subset", *columns, "95 % interval of bits per byte"], rows) + f"<ul class=how>{how}</ul>"
