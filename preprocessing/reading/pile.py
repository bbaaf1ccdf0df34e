"""The Pile (Gao et al. 2020, arXiv 2101.00027): its files by name, and its subsets by their published sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.errors import ConfigError
from contracts.files import user_path
from preprocessing.reading.source_file import SourceFile

NUM_SHARDS = 30
PARTS = {
    "train": tuple(f"train/{number:02d}.jsonl.zst" for number in range(NUM_SHARDS)),
    "val": ("val.jsonl.zst",),
    "test": ("test.jsonl.zst",),
}


@dataclass(frozen=True)
class PublishedSubset:
    """A row of table 1 of the paper.

    Args:
        raw_gib: Size before subsets were repeated.
        weight_percent: Share of the bytes of the published corpus.
        epochs: How often the subset stands in it.
        mean_document_kib: Mean size of a document.
    """

    raw_gib: float
    weight_percent: float
    epochs: float
    mean_document_kib: float


# The names are those in the data (meta.pile_set_name).
SUBSETS = {
    "Pile-CC": PublishedSubset(227.12, 18.11, 1.0, 4.33),
    "PubMed Central": PublishedSubset(90.27, 14.40, 2.0, 30.55),
    "Books3": PublishedSubset(100.96, 12.07, 1.5, 538.36),
    "OpenWebText2": PublishedSubset(62.77, 10.01, 2.0, 3.85),
    "ArXiv": PublishedSubset(56.21, 8.96, 2.0, 46.61),
    "Github": PublishedSubset(95.16, 7.59, 1.0, 5.25),
    "FreeLaw": PublishedSubset(51.15, 6.12, 1.5, 15.06),
    "StackExchange": PublishedSubset(32.20, 5.13, 2.0, 2.16),
    "USPTO Backgrounds": PublishedSubset(22.90, 3.65, 2.0, 4.08),
    "PubMed Abstracts": PublishedSubset(19.26, 3.07, 2.0, 1.30),
    "Gutenberg (PG-19)": PublishedSubset(10.88, 2.17, 2.5, 398.73),
    "OpenSubtitles": PublishedSubset(12.98, 1.55, 1.5, 30.48),
    "Wikipedia (en)": PublishedSubset(6.38, 1.53, 3.0, 1.11),
    "DM Mathematics": PublishedSubset(7.75, 1.24, 2.0, 8.00),
    "Ubuntu IRC": PublishedSubset(5.52, 0.88, 2.0, 545.48),
    "BookCorpus2": PublishedSubset(6.30, 0.75, 1.5, 369.87),
    "EuroParl": PublishedSubset(4.59, 0.73, 2.0, 68.87),
    "HackerNews": PublishedSubset(3.90, 0.62, 2.0, 4.92),
    "YoutubeSubtitles": PublishedSubset(3.73, 0.60, 2.0, 22.55),
    "PhilPapers": PublishedSubset(2.38, 0.38, 2.0, 73.37),
    "NIH ExPorter": PublishedSubset(1.89, 0.30, 2.0, 2.11),
    "Enron Emails": PublishedSubset(0.88, 0.14, 2.0, 1.78),
}


def pile_files(folder: str, part: str) -> list[SourceFile]:
    """List the files of one part of the Pile, as published below `folder`.

    Args:
        part: train, val or test.

    Raises:
        ConfigError: Files are missing; they are named. Or there is no such part.
    """
    if part not in PARTS:
        raise ConfigError(f"the Pile has no part {part!r}; it has {', '.join(PARTS)}.")
    root = user_path(folder)
    missing = [name for name in PARTS[part] if not (root / name).is_file()]
    if missing:
        shown = ", ".join(missing)
        raise ConfigError(
            f"{folder}: {len(missing)} of the {len(PARTS[part])} files of the Pile's part {part} are missing: {shown}. "
            "Copy them there, or name the files that you have without the preset."
        )
    return [SourceFile(name, root / name) for name in PARTS[part]]


def is_of_the_pile(subsets: Mapping[str, Any]) -> bool:
    """Tell whether all these subsets are the Pile's."""
    return bool(subsets) and all(name in SUBSETS for name in subsets)


def compare_with_published(subsets: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, Any]]:
    """Set found subsets beside the published ones.

    Args:
        subsets: Documents and bytes of each found subset.

    Returns:
        Of each published subset: `bytes_percent` found and `published_percent` of all bytes,
        `mean_document_kib` found and published, and `ratio`, the found bytes to those of the
        whole published corpus (1 for all of it, 1/30 for one shard, as shards are mixed).
    """
    total = sum(counts["bytes"] for counts in subsets.values())
    result = {}
    for name, published in SUBSETS.items():
        counts = subsets.get(name, {"documents": 0, "bytes": 0})
        result[name] = {
            "documents": counts["documents"],
            "bytes": counts["bytes"],
            "bytes_percent": round(100 * counts["bytes"] / total, 3) if total else 0.0,
            "published_percent": published.weight_percent,
            "mean_document_kib": round(counts["bytes"] / 1024 / counts["documents"], 2) if counts["documents"] else 0.0,
            "published_mean_document_kib": published.mean_document_kib,
            "ratio": round(counts["bytes"] / (published.raw_gib * published.epochs * 2**30), 6),
        }
    return result


def doubts_about(subsets: Mapping[str, Mapping[str, int]], *, tolerance: float = 0.05) -> list[str]:
    """Say which subsets are not what was published: absent, unknown, or of another share of the bytes.

    Args:
        tolerance: Of the share, relative; and of the mean size of a document.
    """
    doubts = [f"{name} is no subset of the Pile" for name in subsets if name not in SUBSETS]
    for name, row in compare_with_published(subsets).items():
        if not row["documents"]:
            doubts.append(f"{name} is absent")
        elif abs(row["bytes_percent"] / row["published_percent"] - 1) > tolerance:
            doubts.append(f"{name} is {row['bytes_percent']} % of the text, published are {row['published_percent']} %")
        elif abs(row["mean_document_kib"] / row["published_mean_document_kib"] - 1) > tolerance:
            sizes = f"{row['mean_document_kib']} KiB, published are {row['published_mean_document_kib']}"
            doubts.append(f"documents of {name} have {sizes}")
    return doubts
