"""The run's record: `metrics.jsonl`, one line per logged step, written by rank 0 and read by everyone else.

A line has step, time, loss_nats, gradient_norm, learning_rate, tokens (all so far), tokens_per_s,
model_flops_per_s, matmul_peak_share, memory_bytes, and the times of the step on rank 0: data_wait_s, compute_s,
reduce_s and update_s. Where they matter: batch_samples, loss_scale, skipped_steps, roll_backs, and at a step without
update `event` and `reason`; a loss that is not finite stands in the reason alone. After a resume the lines of
steps that are done again are cut off first. Never imports torch.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contracts.errors import InputError
from contracts.json_text import parse_json

METRICS = "metrics.jsonl"


class MetricsWriter:
    """Appends lines; each is in the file when `write` returns."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        cut(path, after_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, **numbers: float | str) -> None:
        self._file.write(json.dumps({"step": step, "time": time.time(), **numbers}) + "\n")
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def cut(path: Path, after_step: int) -> None:
    """Remove the lines of later steps, and a half-written last line."""
    if not path.exists():
        return
    kept = [json.dumps(line) for line in read(path) if line["step"] <= after_step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


def read(path: Path, *, is_strict: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a metrics file; none if it does not exist.

    Args:
        is_strict: Leave out nothing but the last line, which a killed run may have cut.

    Raises:
        InputError: A line is damaged, and `is_strict` says that it matters; names it.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        damage: str | None = None
        for number, line in enumerate(file, 1):
            if damage is not None:
                raise InputError(f"{path}, line {number - 1}: damaged ({damage}). Run shardline verify on the run.")
            try:
                yield _parsed(line)
            except ValueError as error:
                damage = str(error) if is_strict else None


def _parsed(line: bytes) -> dict[str, Any]:
    data = parse_json(line)
    if not isinstance(data, dict) or not isinstance(data.get("step"), int):
        raise ValueError("it has no step")
    if not isinstance(data.get("loss_nats", 0.0), int | float):
        raise ValueError("its loss is no number")
    return data


class LastLine:
    """Follows a growing metrics file and gives its newest line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def newest(self) -> dict[str, Any] | None:
        """Return the newest whole line since the last call; None if there is none."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return None
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in reversed(lines):
            try:
                found = parse_json(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
        return None
