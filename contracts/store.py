"""The artifact store: where artifacts lie, who may build one, and how one is published.

`<store>/<kind>/<label>-<fingerprint[:12]>/` holds an artifact. `recipe.json` is written before
any work and compared on resume; `manifest.json` is written last, in one atomic step, so that it
exists if and only if the artifact is complete. A lease (`.lock`, refreshed by a heartbeat) lets
one of several processes build; the others wait or say who holds it.
"""

import contextlib
import getpass
import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from contracts.artifact import (
    KINDS,
    MANIFEST,
    Artifact,
    FileEntry,
    InputEntry,
    Manifest,
    legal_label,
    read_artifact,
)
from contracts.errors import ConfigError, InputError, LockedError, ShardlineError
from contracts.fingerprint import SHORT_HEX, Recipe, canonical_json
from contracts.progress import Progress, SilentProgress

RECIPE = "recipe.json"
LOCK = ".lock"
PROGRESS = "progress.json"
HEARTBEAT_S = 10.0
LEASE_S = 60.0  # six missed heartbeats; a stalled network disk does not lose the lease

State = Literal["done", "absent", "partial", "running", "stale", "corrupt"]
Summary = Mapping[str, Any]


class Workspace:
    """The folder of an artifact while it is being built.

    Work happens in place, so that a killed run can go on; files are written under temporary
    names and moved. `is_resumed` says that an unfinished build of the same recipe was found.
    """

    def __init__(self, path: Path, *, store: "ArtifactStore", progress: Progress, is_resumed: bool) -> None:
        self.path = path
        self.store = store
        self.is_resumed = is_resumed
        self.progress: Progress = _RecordedProgress(path / PROGRESS, progress)

    def discard(self) -> None:
        """Remove all that was written: for a clean refusal, after which nothing stands under the name."""
        for child in self.path.iterdir():
            if child.name != LOCK:
                shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()


class ArtifactStore:
    """A folder of artifacts.

    Args:
        root: The store's folder; made when the first artifact is built.
        output: Where the next artifact goes, instead of `<root>/<kind>/<name>`; for single
            stages that were told an output folder.
    """

    def __init__(self, root: Path, *, output: Path | None = None) -> None:
        self.root = root
        self.output = output

    def locate(self, kind: str, label: str, recipe: Recipe) -> Path:
        """Return the folder of an artifact, built or not."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of artifact; kinds are {', '.join(KINDS)}.")
        if self.output is not None:
            return self.output
        return self.root / kind / f"{legal_label(label)}-{recipe.fingerprint[:SHORT_HEX]}"

    def get(self, kind: str, label: str, recipe: Recipe) -> Artifact | None:
        """Return the artifact of a recipe if it is complete and its files have their sizes.

        Another label for the same fingerprint is found too: a label is no identity.
        """
        for path in self._candidates(kind, label, recipe):
            if (path / MANIFEST).is_file():
                artifact = read_artifact(path)
                if artifact.fingerprint == recipe.fingerprint and not missing_files(artifact):
                    return artifact
        return None

    def _candidates(self, kind: str, label: str, recipe: Recipe) -> list[Path]:
        first = self.locate(kind, label, recipe)
        if self.output is not None:
            return [first]
        others = sorted((self.root / kind).glob(f"*-{recipe.fingerprint[:SHORT_HEX]}"))
        return [first, *(path for path in others if path != first)]

    def state(
        self, kind: str, label: str, recipe: Recipe, inputs: Mapping[str, Artifact] | None = None
    ) -> State:
        """Say how far an artifact is; `inputs`, where given, tells `stale` from `done`."""
        path = self.locate(kind, label, recipe)
        artifact = None
        for candidate in self._candidates(kind, label, recipe):
            if (candidate / MANIFEST).is_file():
                try:
                    artifact = read_artifact(candidate)
                except InputError:
                    return "corrupt"
                break
        if artifact is not None and artifact.fingerprint == recipe.fingerprint:
            if missing_files(artifact):
                return "corrupt"
            used = artifact.manifest.inputs
            if any(
                name in used and used[name].content != given.manifest.content
                for name, given in (inputs or {}).items()
            ):
                return "stale"
            return "done"
        if lease_holder(path) is not None:
            return "running"
        return "partial" if (path / RECIPE).is_file() else "absent"

    def make(
        self,
        kind: str,
        label: str,
        recipe: Recipe,
        work: Callable[[Workspace], Summary],
        *,
        config: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Artifact] | None = None,
        progress: Progress | None = None,
    ) -> Artifact:
        """Return the artifact of a recipe, building it with `work` unless it is complete.

        Raises:
            LockedError: Another live run builds it and does not finish while this one waits.
            ConfigError: The output folder holds something else.
        """
        progress = progress or SilentProgress()
        inputs = dict(inputs or {})
        path = self.locate(kind, label, recipe)
        if (done := self._done(kind, label, recipe, inputs)) is not None:
            return done
        path.mkdir(parents=True, exist_ok=True)
        try:
            with _Lease(path, progress):
                if (done := self._done(kind, label, recipe, inputs)) is not None:
                    return done
                is_resumed = self._prepare(path, recipe)
                started = time.time()
                workspace = Workspace(path, store=self, progress=progress, is_resumed=is_resumed)
                summary = work(workspace)
                return self._publish(
                    path, kind, label, recipe, summary, config=config or {}, inputs=inputs, started=started
                )
        finally:
            with contextlib.suppress(OSError):
                path.rmdir()  # succeeds only when the work refused and left nothing

    def _done(self, kind: str, label: str, recipe: Recipe, inputs: Mapping[str, Artifact]) -> Artifact | None:
        state = self.state(kind, label, recipe, inputs)
        return self.get(kind, label, recipe) if state == "done" else None

    def _prepare(self, path: Path, recipe: Recipe) -> bool:
        """Compare `recipe.json` with what shall be built; True if an unfinished build goes on."""
        text = canonical_json(recipe.as_dict())
        found = [child.name for child in path.iterdir() if child.name not in (LOCK, PROGRESS)]
        if RECIPE in found and MANIFEST not in found:
            if (path / RECIPE).read_text(encoding="utf-8") == text:
                return True
            if self.output is not None:
                raise ConfigError(
                    f"{path} holds an unfinished build with other settings or inputs. "
                    "Choose another --output, or remove the folder."
                )
        elif found and self.output is not None and MANIFEST in found and RECIPE in found:
            raise ConfigError(
                f"{path} holds another artifact ({read_artifact(path).name}). Choose another --output, or remove the folder."
            )
        elif found and self.output is not None:
            raise ConfigError(f"{path} is not empty and holds no artifact. Choose another --output.")
        for name in found:  # a stale, corrupt or foreign build under a name of the store: do it anew
            child = path / name
            shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        write_atomically(path / RECIPE, text)
        return False

    def _publish(
        self,
        path: Path,
        kind: str,
        label: str,
        recipe: Recipe,
        summary: Summary,
        *,
        config: Mapping[str, Any],
        inputs: Mapping[str, Artifact],
        started: float,
    ) -> Artifact:
        (path / PROGRESS).unlink(missing_ok=True)
        files = digest_files(path)
        manifest = Manifest(
            kind=kind,
            label=legal_label(label),
            fingerprint=recipe.fingerprint,
            content=_content_digest(files),
            recipe=recipe,
            config=config,
            inputs={
                name: InputEntry(item.fingerprint, item.kind, self.relative(item.path), item.manifest.content)
                for name, item in inputs.items()
            },
            files=files,
            summary=dict(summary),
            provenance={**provenance(), "started": started, "seconds": round(time.time() - started, 3)},
        )
        write_atomically(path / MANIFEST, manifest.to_json())
        return Artifact(path, manifest)

    def relative(self, path: Path) -> str:
        """Write a path relative to the store if it lies inside, so that a store can be moved."""
        full, root = path.resolve(), self.root.resolve()
        return full.relative_to(root).as_posix() if full.is_relative_to(root) else full.as_posix()

    def artifacts(self) -> Iterator[Artifact]:
        """List the complete artifacts of the store, in the order of kinds and names."""
        for kind in KINDS:
            for manifest in sorted((self.root / kind).glob(f"*/{MANIFEST}")):
                yield read_artifact(manifest.parent)

    def find(self, reference: str) -> Artifact:
        """Find an artifact by path, by name (`label-fingerprint`), or by a prefix of its fingerprint.

        Raises:
            ConfigError: Nothing, or more than one artifact, answers to the reference.
        """
        path = Path(reference).expanduser()
        if (path / MANIFEST).is_file():
            return read_artifact(path)
        found = [
            item
            for item in self.artifacts()
            if reference in (item.name, item.path.name, f"{item.kind}/{item.path.name}")
            or (len(reference) >= 4 and item.fingerprint.startswith(reference))
        ]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(f"{item.kind}/{item.path.name}" for item in found)
            raise ConfigError(f"{reference!r} fits several artifacts: {names}. Give more of the fingerprint.")
        if path.is_dir():
            read_artifact(path)  # says whether it is unfinished or no artifact at all
        raise ConfigError(
            f"{reference!r} is no folder with an artifact and names none in the store {self.root}."
        )

    def input_artifact(self, entry: InputEntry) -> Artifact | None:
        """Return the artifact that a manifest names as its input, or None if it is gone."""
        path = self.root / entry.path
        with contextlib.suppress(InputError):
            return read_artifact(path)
        matches = sorted((self.root / entry.kind).glob(f"*-{entry.fingerprint[:SHORT_HEX]}/{MANIFEST}"))
        return read_artifact(matches[0].parent) if matches else None

    def digest(self, path: Path) -> str:
        """Return the sha256 of a raw file, remembered by (path, size, mtime_ns) between runs."""
        return DigestCache(self.root / ".digests.json").digest(path)


class DigestCache:
    """Remembers content digests of files outside the store; a changed size or time means hash anew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def digest(self, file: Path) -> str:
        """Return the sha256 of one file.

        Raises:
            ConfigError: The file is missing or cannot be read.
        """
        try:
            status = file.stat()
            known = self._read()
            key, mark = str(file.resolve()), [status.st_size, status.st_mtime_ns]
            entry = known.get(key)
            if isinstance(entry, list) and entry[:2] == mark:
                return str(entry[2])
            value = sha256_of(file)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror or error}).") from error
        known[key] = [*mark, value]
        with contextlib.suppress(OSError):  # a read-only store still works, only slower
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(known))
        return value

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}


@dataclass(frozen=True)
class Holder:
    """Who holds a lease."""

    host: str
    pid: int
    user: str
    age_s: float


def lease_holder(path: Path) -> Holder | None:
    """Say who builds in the folder `path` right now, or None. A dead process of this host holds nothing."""
    lock = path / LOCK
    try:
        age_s = time.time() - lock.stat().st_mtime
        data = json.loads(lock.read_text(encoding="utf-8"))
        holder = Holder(str(data["host"]), int(data["pid"]), str(data["user"]), age_s)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        # Being written at this moment, or left damaged: only its age tells.
        try:
            age_s = time.time() - lock.stat().st_mtime
        except OSError:
            return None
        return Holder("unknown host", 0, "unknown", age_s) if age_s < LEASE_S else None
    if holder.host == socket.gethostname():
        return holder if _is_alive(holder.pid, data.get("process_started")) else None
    return holder if age_s < LEASE_S else None


class _Lease:
    """Holds `.lock` in a folder while a build runs, and keeps it fresh."""

    def __init__(self, path: Path, progress: Progress, wait_s: float = 3600 * 24 * 7) -> None:
        self._path = path
        self._progress = progress
        self._wait_s = wait_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> "_Lease":
        has_told = False
        deadline = time.monotonic() + self._wait_s
        while not self._take():
            holder = lease_holder(self._path)
            if holder is None:
                continue
            text = (
                f"{self._path.name} is being built by process {holder.pid} of {holder.user} on {holder.host}"
            )
            if time.monotonic() > deadline or os.environ.get("SHARDLINE_NO_WAIT"):
                raise LockedError(f"{text}. Wait for it, or stop it, then try again.")
            if not has_told:
                self._progress.note(f"{text}; waiting for it.")
                has_told = True
            time.sleep(0.2)
            if (self._path / MANIFEST).is_file() and lease_holder(self._path) is None:
                continue
        self._thread.start()
        return self

    def _take(self) -> bool:
        lock = self._path / LOCK
        me = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "user": getpass.getuser(),
            "process_started": _process_started(os.getpid()),
        }
        temporary = self._path / f"{LOCK}.{os.getpid()}.{threading.get_ident()}"
        self._path.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(me), encoding="utf-8")
        try:
            os.link(temporary, lock)  # atomic and exclusive, with its content in place
            return True
        except FileExistsError:
            if lease_holder(self._path) is None:
                # Left by a dead run. Moving it away has one winner, who then tries again like all others.
                with contextlib.suppress(FileNotFoundError):
                    grave = self._path / f"{LOCK}.dead.{os.getpid()}.{threading.get_ident()}"
                    lock.rename(grave)
                    grave.unlink()
            return False
        finally:
            temporary.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._path / LOCK)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            (self._path / LOCK).unlink()


def _process_started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, which tells a reused pid from the old one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _is_alive(pid: int, started: object) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return started is None or _process_started(pid) in (None, started)


class _RecordedProgress:
    """Passes progress on and keeps the last report in a file, for `status`."""

    def __init__(self, path: Path, inner: Progress) -> None:
        self._path = path
        self._inner = inner
        self._written = 0.0
        self._started = time.time()

    def update(self, done: float, *, total: float | None, unit: str, **numbers: float | str) -> None:
        self._inner.update(done, total=total, unit=unit, **numbers)
        now = time.time()
        if now - self._written >= 1.0:
            self._written = now
            report = {
                "done": done,
                "total": total,
                "unit": unit,
                "numbers": numbers,
                "started": self._started,
                "time": now,
            }
            with contextlib.suppress(OSError):
                write_atomically(self._path, json.dumps(report), is_durable=False)

    def note(self, text: str) -> None:
        self._inner.note(text)


def write_atomically(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Put `text` at `path` in one step: readers see the old file or the whole new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if is_durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def missing_files(artifact: Artifact) -> list[str]:
    """Name the files of an artifact that are gone or have another size; a quick check."""
    wrong = []
    for entry in artifact.manifest.files:
        try:
            if (artifact.path / entry.path).stat().st_size != entry.size_bytes:
                wrong.append(entry.path)
        except OSError:
            wrong.append(entry.path)
    return wrong


def damaged_files(artifact: Artifact) -> list[str]:
    """Re-read every file of an artifact and name those whose digest differs; a full check."""
    wrong = missing_files(artifact)
    good = [entry for entry in artifact.manifest.files if entry.path not in wrong]
    return sorted(wrong + [e.path for e in good if sha256_of(artifact.path / e.path) != e.sha256])


def digest_files(path: Path) -> tuple[FileEntry, ...]:
    """List the files below `path` with sizes and digests; locks and leftovers of writes stay out."""
    files = sorted(
        (file for file in path.rglob("*") if file.is_file() and not _is_transient(file, path)),
        key=lambda file: file.relative_to(path).as_posix(),
    )
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(sha256_of, files))
    return tuple(
        FileEntry(file.relative_to(path).as_posix(), file.stat().st_size, digest)
        for file, digest in zip(files, digests, strict=True)
    )


def _is_transient(file: Path, root: Path) -> bool:
    name = file.relative_to(root).parts[0]
    return name in (RECIPE, MANIFEST, PROGRESS) or name.startswith(LOCK) or file.name.endswith(".tmp")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content_digest(files: Iterable[FileEntry]) -> str:
    lines = "".join(
        f"{entry.sha256}  {entry.path}\n" for entry in files if not entry.path.startswith("logs/")
    )
    return hashlib.sha256(lines.encode()).hexdigest()[:32]


def provenance() -> dict[str, Any]:
    """Record who made an artifact, where, and with what: commit, versions, host, command line."""
    packages = {}
    for name in ("shardline", "torch", "numpy", "tokenizers", "pyarrow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "host": socket.gethostname(),
        "user": getpass.getuser(),
        "command": [Path(sys.argv[0]).name, *(_without_secret(text) for text in sys.argv[1:])],
        "python": platform.python_version(),
        "packages": packages,
        "commit": _commit(),
    }


def _without_secret(text: str) -> str:
    key, equals, _ = text.partition("=")
    is_secret = (
        any(word in key.lower() for word in ("token", "password", "secret", "api_key"))
        and "tokenizer" not in key.lower()
    )
    scheme, at, host = text.rpartition("@")
    if at and "://" in scheme:  # user:password@host in an address
        return f"{scheme.partition('://')[0]}://***@{host}"
    return f"{key}=***" if equals and is_secret else text


def _commit() -> str | None:
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        run = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


__all__ = ["ArtifactStore", "DigestCache", "Holder", "ShardlineError", "State", "Workspace"]
