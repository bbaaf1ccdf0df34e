"""Paths in settings files are relative to the file, so that a run does not depend on where it is started."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from contracts.configuration import Document
from contracts.files import user_path

# Settings of each section that hold paths.
PATHS: dict[str, tuple[str, ...]] = {
    "corpus": ("sources",),
    "clean": ("sources", "decontaminate"),
    "tokenizer": ("sources", "load"),
    "ingest": ("sources", "tokenizer"),
    "heldout": ("sources", "tokenizer"),
    "merge": ("datasets",),
    "split": ("dataset",),
    "import": ("sources", "tokenizer"),
    "index": ("datasets",),
    "pretrain": ("datasets", "valid_sets", "initial.checkpoint"),
    "reshape": ("checkpoint", "average"),
    "evaluate": ("checkpoint", "data"),
}


def with_absolute_paths(document: Document, folder: Path, dotted: Iterable[str]) -> Document:
    """Make the settings named by `dotted` ("ingest.sources") absolute; those that are absent stay so."""
    data = {**document.data}
    for name in dotted:
        *groups, key = name.split(".")
        place: Any = data
        for group in groups:
            if isinstance(place.get(group), dict):
                place[group] = {**place[group]}
            place = place.get(group)
            if not isinstance(place, dict):
                break
        else:
            value = place.get(key)
            if isinstance(value, str):
                place[key] = _absolute(value, folder)
            elif isinstance(value, list):
                place[key] = [_absolute(item, folder) if isinstance(item, str) else item for item in value]
            elif isinstance(value, dict):
                place[key] = {
                    n: _absolute(item, folder) if isinstance(item, str) else item for n, item in value.items()
                }
    return Document(data, document.source, document.lines, document.origins)


def _absolute(text: str, folder: Path) -> str:
    return text if not text or "://" in text else os.path.normpath(folder / user_path(text))
