"""The data card: what a dataset holds, where it came from and what was left out, as a page and as JSON."""

import html
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.files import write_atomically
from contracts.json_text import parse_json
from contracts.store import Workspace
from evaluation.config import DataCardConfig
from evaluation.page import image, number, page, table
from evaluation.plots import length_bars, named_bars, subset_sizes
from preprocessing.dataset.documents import choose_documents, show_documents
from preprocessing.dataset.inspection import length_histogram
from preprocessing.dataset.token_dataset import TokenDataset

PAGE = "report.html"
CARD = "data_card.json"
REJECTS = "rejects.jsonl"
MAX_ROWS = 200  # of a table
ACCOUNT = ("lines", "documents", "empty", "filtered", "rejected", "tokens", "bytes")
_VALUES = re.compile(r"0x[0-9a-f]+|U\+[0-9A-F]+|(?<![\w.+-])\d+(?![\w-])")


def data_card(settings: DataCardConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Describe a dataset in `report.html` and `data_card.json`, with its plots beside them.

    Raises:
        ConfigError: No dataset is given.
    """
    if "dataset" not in inputs:
        raise ConfigError("report: neither a checkpoint nor a dataset. Give --checkpoint or --dataset.")
    artifact = inputs["dataset"]
    dataset = TokenDataset(artifact.path)
    card = describe(dataset)
    folder = workspace.path
    title = settings.title or f"Data: {artifact.manifest.label}"
    plots = _draw(folder, card)
    body = [
        table(["fact", "value"], [[name, number(value)] for name, value in card["facts"].items()]),
        *_subset_table(card["subsets"]),
        *(image(name, folder / file) for name, file in plots),
        *_reason_table("Rejected records, by reason", card["rejects"]),
        *_reason_table("Filtered records, by reason", card["filtered"]),
        *_source_table(card["sources"]),
        *_samples(dataset, settings.samples),
    ]
    about = "What the dataset holds, where it came from, and what was left out."
    write_atomically(folder / PAGE, page(title, about, body, {"dataset": artifact}))
    write_atomically(folder / CARD, json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    return {"title": title, "plots": [file for _, file in plots], **card["facts"]}


def describe(dataset: TokenDataset) -> dict[str, Any]:
    """Return what is known of a dataset, as plain data."""
    summary = dataset.summary
    size = summary.get("bytes")
    facts: dict[str, Any] = {name: summary[name] for name in ACCOUNT if name in summary}
    facts |= {"documents": dataset.num_documents, "tokens": dataset.num_tokens}
    if size:
        facts["bytes_per_token"] = size / max(1, dataset.num_tokens)
    facts |= _duplicates(dataset)
    for name in ("vocab_size", "special_tokens_in_text", "replaced_characters", "byte_order_marks", "damaged_files"):
        if isinstance(summary.get(name), int):
            facts[name] = summary[name]
    subsets = summary.get("subsets", {})
    return {
        "facts": facts,
        "eod_token": summary.get("eod_token"),
        "subsets": [_subset(name, counts, dataset.num_tokens) for name, counts in subsets.items()],
        "lengths": length_histogram(dataset.lengths),
        "rejects": _reasons(dataset.path / REJECTS),
        "filtered": dict(summary.get("filtered_by", {})),
        "sources": [dict(source) for source in summary.get("sources", [])],
    }


def _subset(name: str, counts: Mapping[str, int], tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {"subset": name, **counts}
    found["share_of_tokens"] = counts["tokens"] / max(1, tokens)
    found["tokens_per_document"] = counts["tokens"] / max(1, counts.get("documents", 0))
    if counts.get("bytes"):
        found["bytes_per_token"] = counts["bytes"] / max(1, counts["tokens"])
    return found


def _duplicates(dataset: TokenDataset) -> dict[str, int]:
    """Count documents whose text stands in the dataset before, by their digests, and their tokens."""
    digests, tokens = dataset.column("digest"), dataset.column("tokens")
    if digests is None or tokens is None:
        return {}
    keys = np.frombuffer(b"".join(digests), dtype=[("high", ">u8"), ("low", ">u8")])
    order = np.lexsort((keys["low"], keys["high"]))  # stable, so the first of equals stays first
    ordered = keys[order]
    is_repeated = np.zeros(len(order), dtype=bool)
    is_repeated[1:] = ordered[1:] == ordered[:-1]
    repeated = order[is_repeated]
    return {
        "duplicate_documents": len(repeated),
        "duplicate_tokens": int(np.asarray(tokens, dtype=np.int64)[repeated].sum()),
    }


def _reasons(path: Path) -> dict[str, int]:
    """Count rejects by reason; values that differ from one to the next are left out of it."""
    counts: Counter[str] = Counter()
    if path.is_file():
        with path.open(encoding="utf-8", errors="backslashreplace") as file:
            for line in file:
                counts[_VALUES.sub("_", str(parse_json(line).get("reason", "")))] += 1
    return dict(counts.most_common())


def _draw(folder: Path, card: Mapping[str, Any]) -> list[tuple[str, str]]:
    plots = []
    subsets: Sequence[Mapping[str, Any]] = card["subsets"]
    if subsets:
        names = [item["subset"] for item in subsets]
        subset_sizes(folder / "tokens.png", names, [item["tokens"] for item in subsets])
        plots.append(("Tokens by subset", "tokens.png"))
        if all("bytes_per_token" in item for item in subsets):
            values = [item["bytes_per_token"] for item in subsets]
            named_bars(folder / "bytes_per_token.png", names, values, label="bytes of text per token")
            plots.append(("Bytes per token", "bytes_per_token.png"))
    if card["lengths"]:
        length_bars(folder / "lengths.png", card["lengths"])
        plots.append(("Lengths of documents", "lengths.png"))
    return plots


def _subset_table(subsets: Sequence[Mapping[str, Any]]) -> list[str]:
    if not subsets:
        return []
    columns = ("subset", "documents", "tokens", "bytes", "share_of_tokens", "tokens_per_document", "bytes_per_token")
    rows = [[item["subset"], *(number(item.get(name)) for name in columns[1:])] for item in subsets]
    return ["<h2>Subsets</h2>", table([name.replace("_", " ") for name in columns], rows)]


def _reason_table(title: str, reasons: Mapping[str, int]) -> list[str]:
    if not reasons:
        return []
    rows = [[reason, number(count)] for reason, count in list(reasons.items())[:MAX_ROWS]]
    return [f"<h2>{html.escape(title)}</h2>", table(["reason", "records"], rows)]


def _source_table(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    if not sources:
        return []
    columns = [name for name in ACCOUNT if any(name in source for source in sources)]
    rows = [[source["name"], *(number(source.get(name)) for name in columns)] for source in sources[:MAX_ROWS]]
    more = f"<p>{len(sources) - MAX_ROWS} more files are in {CARD}.</p>" if len(sources) > MAX_ROWS else ""
    return ["<h2>Sources</h2>", table(["file", *columns], rows), more]


def _samples(dataset: TokenDataset, count: int) -> list[str]:
    if not count or not dataset.has_tokenizer:
        return []
    numbers = choose_documents(dataset, count, seed=0)
    parts = ["<h2>Some documents</h2>"]
    for item in show_documents(dataset, numbers, max_tokens=200):
        place = f"{item.file}:{item.line}" if item.file is not None else f"document {item.document}"
        about = f"{place}, {item.subset or 'no subset'}, {item.tokens:,} tokens"
        parts.append(f"<p class=how>{html.escape(about)}</p><pre>{html.escape(item.text or '')}</pre>")
    return parts
