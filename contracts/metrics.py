"""Metrics on their way to a tracker: `metrics.jsonl` in, points out; names made legal and back.

A line of `metrics.jsonl` is {"step": 10, "time": 1790000000.1, "loss_nats": 5.1, ...}: every
numeric field but step and time is the metric `train/<field>`.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.json_text import parse_json

TRAIN = "train/"
_LOSS = "loss_nats"
_KEY_ESCAPE = re.compile(r"::([0-9a-f]+):")
_NAME_ESCAPE = re.compile(r"~([0-9a-f]{2})")
_MAX_KEY = 250


@dataclass(frozen=True)
class Point:
    """The numbers of one optimizer step; `time_ms` since the epoch."""

    step: int
    time_ms: int
    values: Mapping[str, float]

    @classmethod
    def of_line(cls, line: bytes) -> "Point | None":
        """Read one line of `metrics.jsonl`; None for one that is damaged or holds no numbers."""
        try:
            data = parse_json(line)
            step, time_ms = int(data["step"]), round(float(data["time"]) * 1000)
        except (ValueError, KeyError, TypeError, OverflowError):
            return None
        values = {
            TRAIN + key: float(value) for key, value in data.items() if key not in ("step", "time") and is_number(value)
        }
        return cls(step, time_ms, values) if values else None


@dataclass
class Replays:
    """Drops the steps that a resumed run repeats; keeps one that came out with another loss.

    Attributes:
        resumed_from: Steps that were repeated with another loss.
    """

    seen: dict[int, float | None] = field(default_factory=dict)
    resumed_from: set[int] = field(default_factory=set)

    def fresh(self, points: Iterable[Point]) -> Iterator[Point]:
        """Yield the points that are new."""
        for point in points:
            loss = point.values.get(TRAIN + _LOSS)
            if point.step in self.seen:
                before = self.seen[point.step]
                if loss == before or (_is_nan(loss) and _is_nan(before)):
                    continue
                self.resumed_from.add(point.step)
            self.seen[point.step] = loss
            yield point


def read_points(path: Path, offset: int = 0) -> tuple[list[Point], int]:
    """Read the complete lines of `metrics.jsonl` from a byte offset on.

    Returns:
        The points, and the offset behind the last complete line. A half-written last line stays
        for the next call; a missing file has no points.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError:
        return [], offset
    end = data.rfind(b"\n") + 1
    points = [Point.of_line(line) for line in data[:end].splitlines()]
    return [point for point in points if point is not None], offset + end


def numbers(summary: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Find the numbers of a nested summary; names are joined by "/"."""
    result: dict[str, float] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            result.update(numbers(value, f"{prefix}{key}/"))
        elif is_number(value):
            result[f"{prefix}{key}"] = float(value)
    return result


def is_number(value: object) -> bool:
    """Tell numbers from true/false, texts and the rest."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)


def legal_key(key: str) -> str:
    """Make a metric or parameter key legal for MLflow; `original_key` gets it back.

    A comma becomes a colon ("acc,none" -> "acc:none"), anything else illegal `::<hex>:`. Keys
    over 250 characters raise; see `is_loggable`.
    """
    if not key:
        return "::"
    result: list[str] = []
    for n, char in enumerate(key):
        if char == "," and key[n - 1 : n] != ",":
            result.append(":")
        elif _is_legal(key, n):
            result.append(char)
        else:
            result.append(f"::{ord(char):x}:")
    return "".join(result)


def original_key(key: str) -> str:
    """Undo `legal_key`."""
    if key == "::":
        return ""
    result, position = [], 0
    while position < len(key):
        if match := _KEY_ESCAPE.match(key, position):
            result.append(chr(int(match[1], 16)))
            position = match.end()
        else:
            result.append("," if key[position] == ":" else key[position])
            position += 1
    return "".join(result)


def _is_legal(key: str, n: int) -> bool:
    """Tell whether MLflow takes the character at `n`: no path outside, no empty component."""
    char = key[n]
    if char == "/":
        return 0 < n < len(key) - 1 and key[n - 1] != "/"
    if char == ".":
        start, end = key.rfind("/", 0, n) + 1, key.find("/", n)
        return set(key[start : end if end >= 0 else len(key)]) != {"."}
    return re.match(r"[\w \-]", char) is not None


def is_loggable(key: str) -> bool:
    """Tell whether the legal form of a key fits MLflow's 250 characters."""
    return len(legal_key(key)) <= _MAX_KEY


def legal_name(name: str) -> str:
    """Make a name legal for a LoggedModel ("gpt-1.3b" -> "gpt-1,3b"); `original_name` gets it back."""
    escaped = re.sub("[/:%\"'~,]", lambda match: f"~{ord(match[0]):02x}", name)
    return escaped.replace(".", ",")


def original_name(name: str) -> str:
    """Undo `legal_name`."""
    return _NAME_ESCAPE.sub(lambda match: chr(int(match[1], 16)), name.replace(",", "."))
