"""The artifact store: where artifacts lie, who may build one, and how one is published.

`<store>/<kind>/<label>-<fingerprint[:12]>/` holds an artifact. `recipe.json` is written before
any work and compared on resume; `manifest.json` is written last, in one atomic step, so that it
exists if and only if the artifact is complete.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from contracts.artifact import KINDS, MANIFEST, Artifact, InputEntry, Manifest, legal_label, read_artifact
from contracts.changes import changes
from contracts.digests import BOOKKEEPING, DigestCache, content_digest, digest_files, missing_files
from contracts.errors import ConfigError, InputError, LockedError, ShardlineError
from contracts.files import folders_in, storage_errors, sync, sync_all, write_atomically
from contracts.fingerprint import SHORT_HEX, Recipe, canonical_json
from contracts.json_text import parse_json
from contracts.lease import LOCK, Holder, Lease, lease_holder
from contracts.outputs import outputs_of, remember_output
from contracts.progress import Progress, SilentProgress
from contracts.provenance import masked, provenance
from contracts.references import find_artifact
from contracts.workspace import PROGRESS, RESULT, Workspace, clear_folder

RECIPE = "recipe.json"
ATTEMPTS = "attempts.jsonl"

State = Literal["done", "absent", "partial", "running", "stale", "corrupt"]
Summary = Mapping[str, Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Build:
    """An artifact that is not complete: who works on it, if anybody, and the last report of progress."""

    path: Path
    kind: str
    holder: Holder | None
    progress: Mapping[str, Any]


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
        self._digests = DigestCache(root / ".digests.jsonl")

    def locate(self, kind: str, label: str, recipe: Recipe) -> Path:
        """Return the folder of an artifact, built or not.

        A folder of the same fingerprint under another label is taken: a label is no identity.
        """
        return self._candidates(kind, label, recipe)[0]

    def get(self, kind: str, label: str, recipe: Recipe) -> Artifact | None:
        """Return the artifact of a recipe if it is complete and its files have their sizes."""
        for path in self._candidates(kind, label, recipe):
            with contextlib.suppress(InputError):
                artifact = read_artifact(path)
                if artifact.fingerprint == recipe.fingerprint and not missing_files(artifact):
                    return artifact
        return None

    def _candidates(self, kind: str, label: str, recipe: Recipe) -> list[Path]:
        """List the folders that may hold a recipe: complete ones first, then the one of this label."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of artifact; kinds are {', '.join(KINDS)}.")
        if self.output is not None:
            return [self.output]
        own = self.root / kind / f"{legal_label(label)}-{recipe.fingerprint[:SHORT_HEX]}"
        ending = f"-{recipe.fingerprint[:SHORT_HEX]}"
        others = [self.root / kind / name for name in folders_in(self.root / kind) if name.endswith(ending)]
        if own in others or not others:
            others = [own, *(path for path in others if path != own)]
        return sorted(others, key=lambda path: not (path / MANIFEST).is_file())

    def state(self, kind: str, label: str, recipe: Recipe, inputs: Mapping[str, Artifact] | None = None) -> State:
        """Say how far an artifact is; `inputs`, where given, tells `stale` from `done`."""
        path = self.locate(kind, label, recipe)
        artifact = self.get(kind, label, recipe)
        if artifact is not None:
            used = artifact.manifest.inputs
            is_stale = any(
                name in used and used[name].content != given.manifest.content for name, given in (inputs or {}).items()
            )
            if not is_stale:
                return "done"
        if lease_holder(path) is not None:
            return "running"
        if artifact is not None:
            return "stale"
        if not self._holds_recipe(path, recipe):
            return "absent"
        return "corrupt" if (path / MANIFEST).exists() else "partial"

    def _holds_recipe(self, path: Path, recipe: Recipe) -> bool:
        try:
            return (path / RECIPE).read_text(encoding="utf-8") == canonical_json(recipe.as_dict())
        except (OSError, UnicodeDecodeError):
            return False

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
        force: bool = False,
    ) -> Artifact:
        """Return the artifact of a recipe, building it with `work` unless it is complete.

        Args:
            force: Build it from scratch even if it is complete.

        Raises:
            LockedError: Another live run builds it and does not finish while this one waits.
            ConfigError: The output folder holds something else.
            ShardlineError: The disk is full, read-only or otherwise unusable.
        """
        progress = progress or SilentProgress()
        inputs = dict(inputs or {})
        if not force and (done := self._done(kind, label, recipe, inputs)) is not None:
            return done
        path = self.locate(kind, label, recipe)
        self._refuse_other_run(path, recipe)
        with storage_errors(path):
            try:
                with Lease(path, name=self.relative(path), progress=progress) as lease:
                    if not force and (done := self._done(kind, label, recipe, inputs)) is not None:
                        return done
                    if self.output is not None:
                        self._remember(kind, path)
                    workspace = self._open(path, recipe, progress, force=force)
                    try:
                        summary = work(workspace)
                        return self._publish(
                            workspace, kind, label, recipe, summary, config=config, inputs=inputs, lease=lease
                        )
                    except BaseException:
                        _forget_if_empty(path)
                        raise
            finally:
                with contextlib.suppress(OSError):
                    path.rmdir()  # succeeds only when nothing was made, and nobody else waits in it

    def share(
        self,
        kind: str,
        label: str,
        recipe: Recipe,
        begin: Callable[[Workspace], None],
        *,
        inputs: Mapping[str, Artifact] | None = None,
        progress: Progress | None = None,
    ) -> Workspace | Artifact:
        """Open an artifact's folder for one of several processes that fill it together, or return what is done.

        `begin` is called under the lease, by every process, and lays down what they share. Nobody
        holds the lease afterwards: those processes agree among themselves who does what. One that
        finds all of it done calls `make`, whose `work` puts it together.

        Raises:
            LockedError: Another live run builds it alone and does not finish while this one waits.
            ConfigError: The output folder holds something else.
            ShardlineError: The disk is full, read-only or otherwise unusable.
        """
        progress, inputs = progress or SilentProgress(), dict(inputs or {})
        if (done := self._done(kind, label, recipe, inputs)) is not None:
            return done
        path = self.locate(kind, label, recipe)
        self._refuse_other_run(path, recipe)
        with storage_errors(path):
            try:
                with Lease(path, name=self.relative(path), progress=progress):
                    if (done := self._done(kind, label, recipe, inputs)) is not None:
                        return done
                    if self.output is not None:
                        self._remember(kind, path)
                    workspace = self._open(path, recipe, progress, force=False)
                    try:
                        begin(workspace)
                    except BaseException:
                        _forget_if_empty(path)
                        raise
                    return workspace
            finally:
                with contextlib.suppress(OSError):
                    path.rmdir()

    def _refuse_other_run(self, path: Path, recipe: Recipe) -> None:
        """Refuse at once what waiting cannot help: the folder is being filled with something else."""
        if self.output is None or self._holds_recipe(path, recipe) or not (path / RECIPE).exists():
            return
        if (holder := lease_holder(path)) is not None:
            raise LockedError(
                f"{path} is being built by {holder} with other settings or inputs. Choose another --output."
            )

    def _remember(self, kind: str, path: Path) -> None:
        with contextlib.suppress(OSError):  # a read-only store does not keep anybody from writing elsewhere
            remember_output(self.root, kind, path)

    def _done(self, kind: str, label: str, recipe: Recipe, inputs: Mapping[str, Artifact]) -> Artifact | None:
        is_done = self.state(kind, label, recipe, inputs) == "done"
        return self.get(kind, label, recipe) if is_done else None

    def _open(self, path: Path, recipe: Recipe, progress: Progress, *, force: bool) -> Workspace:
        """Make the folder ready: go on with an unfinished build of the recipe, or start from nothing."""
        is_ours = self._holds_recipe(path, recipe)
        found = [name.name for name in path.iterdir() if not name.name.startswith(LOCK)]
        is_complete = MANIFEST in found
        is_resumed = is_ours and not is_complete and not force
        if not is_resumed:
            if not is_ours and any(name not in (PROGRESS, ATTEMPTS) for name in found):
                self._refuse_foreign(path, recipe, found)
            # The manifest goes first, so that no crash leaves it beside half of the files.
            (path / MANIFEST).unlink(missing_ok=True)
            sync(path)
            clear_folder(path)
            write_atomically(path / RECIPE, canonical_json(recipe.as_dict()))
        with (path / ATTEMPTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"started": time.time(), "host": os.uname().nodename, "pid": os.getpid()}))
            file.write("\n")
        return Workspace(path, store=self, progress=progress, is_resumed=is_resumed)

    def _refuse_foreign(self, path: Path, recipe: Recipe, found: list[str]) -> None:
        """Refuse to clear a folder that holds anything but a damaged build of this very recipe."""
        if MANIFEST in found:
            artifact = None
            with contextlib.suppress(InputError):
                artifact = read_artifact(path)
            if artifact is not None and artifact.fingerprint != recipe.fingerprint:
                raise ConfigError(
                    f"{path} holds another artifact, {artifact.name}{_first_change(path, recipe)}. "
                    "Choose another --output, or remove the folder."
                )
        if self.output is None:
            return  # a name of the store is made of the fingerprint: a damaged build, done anew
        if RECIPE in found:
            raise ConfigError(
                f"{path} holds an unfinished build with other settings or inputs{_first_change(path, recipe)}. "
                "Choose another --output, or remove the folder."
            )
        raise ConfigError(f"{path} is not empty and holds no artifact. Choose another --output.")

    def _publish(
        self,
        workspace: Workspace,
        kind: str,
        label: str,
        recipe: Recipe,
        summary: Summary,
        *,
        config: Mapping[str, Any] | None,
        inputs: Mapping[str, Artifact],
        lease: Lease,
    ) -> Artifact:
        path = workspace.path
        for leftover in list(path.rglob("*.tmp")):  # of writes that a kill -9 cut short
            if leftover.is_file():
                leftover.unlink()
        files = digest_files(path, workspace.known_digests)
        # A manifest must not outlive, in a power cut, what it vouches for.
        sync_all(path / entry.path for entry in files)
        attempts = _read_attempts(path)
        finished = time.time()
        times = {
            "started": attempts[0]["started"],
            "finished": finished,
            "seconds": round(finished - attempts[-1]["started"], 3),
            "attempts": attempts,
        }
        manifest = Manifest(
            kind=kind,
            label=legal_label(label),
            fingerprint=recipe.fingerprint,
            content=content_digest(files),
            recipe=recipe,
            config=masked(config or {}),
            inputs={
                name: InputEntry(item.fingerprint, item.kind, self.relative(item.path), item.manifest.content)
                for name, item in inputs.items()
            },
            files=files,
            summary=dict(summary),
            provenance={**provenance(), **times},
        )
        lease.check()
        write_atomically(path / MANIFEST, manifest.to_json())
        for name in (PROGRESS, ATTEMPTS, RESULT):
            (path / name).unlink(missing_ok=True)
        return read_artifact(path)

    def relative(self, path: Path) -> str:
        """Write a path relative to the store if it lies inside, so that a store can be moved."""
        for full, root in ((path.absolute(), self.root.absolute()), (path.resolve(), self.root.resolve())):
            if full.is_relative_to(root):
                return full.relative_to(root).as_posix()
        return path.resolve().as_posix()

    def artifacts(self, *, on_broken: Callable[[InputError], None] | None = None) -> Iterator[Artifact]:
        """List the complete artifacts of the store, in the order of kinds and names, then those built outside.

        Args:
            on_broken: Told of each manifest that cannot be read, which is then skipped; without
                it a warning is logged.
        """
        for _, path in self._folders():
            artifact = self.read_or_tell(path, on_broken)
            if artifact is not None:
                yield artifact

    def _folders(self) -> Iterator[tuple[str, Path]]:
        """List kind and folder of every artifact, complete or not."""
        for kind in KINDS:
            for name in folders_in(self.root / kind):
                yield kind, self.root / kind / name
        yield from outputs_of(self.root)

    def read_or_tell(self, path: Path, on_broken: Callable[[InputError], None] | None = None) -> Artifact | None:
        try:
            return read_artifact(path)
        except InputError as error:
            if (path / MANIFEST).exists():
                tell = on_broken or (lambda error: _log.warning("%s Skipped; rebuild or remove it.", error))
                tell(error)
            return None

    def builds(self) -> Iterator[Build]:
        """List the artifacts that are not complete: running, or left by a run that was stopped."""
        for kind, path in self._folders():
            if (path / MANIFEST).exists():
                continue
            try:
                report = parse_json((path / PROGRESS).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                report = {}
            yield Build(path, kind, lease_holder(path), report if isinstance(report, dict) else {})

    def find(self, reference: str) -> Artifact:
        """Find an artifact by path, by name (`label-fingerprint`), or by a prefix of its fingerprint.

        Raises:
            ConfigError: Nothing, or more than one artifact, answers to the reference.
            InputError: The path named is an unfinished or damaged artifact.
        """
        return find_artifact(self, reference)

    def input_artifact(self, entry: InputEntry) -> Artifact | None:
        """Return the artifact that a manifest names as its input, or None if it is gone."""
        if (artifact := self._read_exactly(self.root / entry.path, entry)) is not None:
            return artifact
        folder = self.root / entry.kind  # moved out of another store, or given another label
        ending = f"-{entry.fingerprint[:SHORT_HEX]}"
        found = (self._read_exactly(folder / name, entry) for name in folders_in(folder) if name.endswith(ending))
        return next((artifact for artifact in found if artifact is not None), None)

    def _read_exactly(self, path: Path, entry: InputEntry) -> Artifact | None:
        try:
            artifact = read_artifact(path)
        except InputError:
            return None
        return artifact if artifact.fingerprint == entry.fingerprint else None

    def digest(self, path: Path) -> str:
        """Return the sha256 of a raw file, remembered by (path, size, mtime_ns) between runs."""
        return self._digests.digest(path)

    def digest_all(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Return the sha256 of each named raw file, several at a time; see `digest`."""
        return self._digests.digest_all(files)


def _first_change(path: Path, recipe: Recipe) -> str:
    """Name the first settings that differ from an unfinished build, for a message; "" if it cannot be read."""
    try:
        old = parse_json((path / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    found = changes(old, recipe.as_dict())
    return f" ({'; '.join(str(change) for change in found[:3])})" if found else ""


def _forget_if_empty(path: Path) -> None:
    """Remove the bookkeeping of a build that failed before it wrote anything."""
    with contextlib.suppress(OSError):
        names = [child.name for child in path.iterdir() if not child.name.startswith(LOCK)]
        if all(name in BOOKKEEPING for name in names):
            for name in names:
                (path / name).unlink(missing_ok=True)


def _read_attempts(path: Path) -> list[dict[str, Any]]:
    attempts = []
    with contextlib.suppress(OSError):
        for line in (path / ATTEMPTS).read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                attempts.append(parse_json(line))
    good = [item for item in attempts if isinstance(item, dict) and isinstance(item.get("started"), int | float)]
    return good or [{"started": time.time()}]


__all__ = ["ArtifactStore", "Build", "DigestCache", "Holder", "ShardlineError", "State", "Workspace"]
