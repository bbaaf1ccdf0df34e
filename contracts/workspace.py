"""The folder of an artifact while a stage fills it."""

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from contracts.artifact import Artifact, InputEntry
from contracts.errors import InputError
from contracts.files import write_atomically
from contracts.json_text import parse_json
from contracts.lease import LOCK
from contracts.progress import Progress

PROGRESS = "progress.json"
RESULT = "result.json"


class StoreAtWork(Protocol):
    """What a stage may ask of the store while it works; see `contracts.store.ArtifactStore`."""

    root: Path
    output: Path | None

    def relative(self, path: Path) -> str: ...

    def input_artifact(self, entry: InputEntry) -> Artifact | None: ...

    def digest(self, path: Path) -> str: ...

    def digest_all(self, files: Mapping[str, Path]) -> dict[str, str]: ...


class Workspace:
    """The folder of an artifact while it is being built.

    Work happens in place, so that a killed run can go on; files are written under temporary
    names ending in `.tmp` and moved.

    Args:
        path: The folder; it keeps its name when the artifact is published.
        store: The store that the artifact belongs to.
        progress: Receives reports; the last one is also kept in `progress.json`.
        is_resumed: An unfinished build of the same recipe was found here.

    Attributes:
        known_digests: sha256 in hex by relative path. A writer that has the digest of a file at
            hand puts it here, and publication does not read that file again.
    """

    def __init__(self, path: Path, *, store: StoreAtWork, progress: Progress, is_resumed: bool) -> None:
        self.path = path
        self.store = store
        self.is_resumed = is_resumed
        self.progress: Progress = _RecordedProgress(path / PROGRESS, progress)
        self.known_digests: dict[str, str] = {}

    def keep_result(self, summary: Mapping[str, Any]) -> None:
        """Note that the work is complete, durably, before what a resumed run would need is removed."""
        write_atomically(self.path / RESULT, json.dumps({"summary": summary, "digests": self.known_digests}))

    def kept_result(self) -> dict[str, Any] | None:
        """Return the summary of work that is complete but was not published; its digests are known then.

        Raises:
            InputError: A file whose digest was noted is gone.
        """
        if not self.is_resumed:
            return None
        try:
            kept = parse_json((self.path / RESULT).read_text(encoding="utf-8"))
            summary, digests = dict(kept["summary"]), dict(kept["digests"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        for name in digests:
            if not (self.path / name).is_file():
                raise InputError(f"{self.path / name}: this finished file is gone. Remove {self.path}, then try again.")
        self.known_digests.update(digests)
        return summary

    def discard(self) -> None:
        """Remove all that was written: for a clean refusal, after which nothing stands under the name."""
        clear_folder(self.path)


def clear_folder(path: Path) -> None:
    """Remove what a folder holds, except locks; files that others have mapped stay readable to them."""
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif not child.name.startswith(LOCK):
            child.unlink(missing_ok=True)


class _RecordedProgress:
    """Passes progress on and keeps the last report in a file, for `status`."""

    def __init__(self, path: Path, inner: Progress) -> None:
        self._path = path
        self._inner = inner
        self._written_s = 0.0
        self._started_s = time.time()
        self._first: tuple[float, float] | None = None  # how far and when at the first report: after start-up

    def update(self, done: float, *, total: float | None, unit: str, **numbers: float | str) -> None:
        self._inner.update(done, total=total, unit=unit, **numbers)
        now_s = time.time()
        self._first = self._first or (done, now_s)
        if now_s - self._written_s < 1.0:
            return
        self._written_s = now_s
        report = {
            "done": done,
            "total": total,
            "unit": unit,
            "numbers": numbers,
            "started": self._started_s,
            "first_done": self._first[0],
            "first_time": self._first[1],
            "time": now_s,
        }
        with contextlib.suppress(OSError, TypeError):
            write_atomically(self._path, json.dumps(report), is_durable=False)

    def note(self, text: str) -> None:
        self._inner.note(text)
