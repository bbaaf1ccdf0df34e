"""Plots of the report, drawn with matplotlib off screen."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INK, ACCENT, QUIET = "#1f2933", "#2563eb", "#9aa5b1"


def loss_curve(path: Path, steps: Sequence[int], losses: Sequence[float], *, unigram: float | None) -> None:
    """Draw the training loss by step, and the entropy that knowing token frequencies alone would reach.

    Args:
        losses: Nats per token.
        unigram: Entropy of the token frequencies, nats; None draws no line.
    """
    figure, axes = _axes(7.5, 4.0)
    axes.plot(steps, losses, color=ACCENT, linewidth=1.4, label="training loss")
    if unigram is not None:
        axes.axhline(unigram, color=INK, linestyle="--", linewidth=1.0, label=f"unigram entropy {unigram:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False)
    _save(figure, path)


def subset_bars(
    path: Path, names: Sequence[str], series: Mapping[str, Sequence[float]], bounds: Mapping[str, Sequence[Any]]
) -> None:
    """Draw bits per byte of each subset, one bar per model, with intervals.

    Args:
        series: Model to values, in the order of `names`.
        bounds: Model to (low, high) pairs, in the same order.
    """
    figure, axes = _axes(7.5, 1.2 + 0.35 * len(names) * max(1, len(series)))
    height = 0.8 / max(1, len(series))
    colours = [ACCENT, "#f59e0b", "#10b981", "#8b5cf6", "#ef4444"]
    for place, (model, values) in enumerate(series.items()):
        at = [n + place * height for n in range(len(names))]
        low = [value - pair[0] for value, pair in zip(values, bounds[model], strict=True)]
        high = [pair[1] - value for value, pair in zip(values, bounds[model], strict=True)]
        bar_colour = colours[place % len(colours)]
        axes.barh(at, values, height * 0.9, xerr=[low, high], color=bar_colour, ecolor=INK, capsize=2, label=model)
    axes.set_yticks([n + height * (len(series) - 1) / 2 for n in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel("bits per byte, with 95 % intervals")
    if len(series) > 1:
        figure.legend(frameon=False, loc="outside lower center", ncols=3)
    _save(figure, path)


def subset_sizes(path: Path, names: Sequence[str], tokens: Sequence[int]) -> None:
    """Draw the tokens of each subset of the training data."""
    named_bars(path, names, [count / 1e6 for count in tokens], label="tokens (millions)")


def named_bars(path: Path, names: Sequence[str], values: Sequence[float], *, label: str) -> None:
    """Draw one bar for each name, the first on top."""
    figure, axes = _axes(7.5, 1.2 + 0.35 * len(names))
    axes.barh(range(len(names)), values, color=ACCENT)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    _save(figure, path)


def length_bars(path: Path, rows: Sequence[Mapping[str, int]]) -> None:
    """Draw the shares of documents and of tokens by the length of the document.

    Args:
        rows: Bins `from` .. `to` with `sequences` and `tokens`, in order.
    """
    figure, axes = _axes(7.5, 3.6)
    at = range(len(rows))
    for offset, key, name, colour in ((-0.2, "sequences", "documents", QUIET), (0.2, "tokens", "tokens", ACCENT)):
        total = max(1, sum(row[key] for row in rows))
        axes.bar([n + offset for n in at], [100 * row[key] / total for row in rows], 0.4, color=colour, label=name)
    axes.set_xticks(at, [f"{row['from']:,}" for row in rows], rotation=45, ha="right")
    axes.set_xlabel("length of the document in tokens, from")
    axes.set_ylabel("share (%)")
    axes.legend(frameon=False)
    _save(figure, path)


def _axes(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color=QUIET, alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    # A fixed date and software name keep the bytes the same from run to run.
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
