"""Folders of checkpoints: which are whole, and which is the newest to go on from. Never imports torch.

Three kinds are known. Native: `step-00000100/` with a `manifest.json`, written last. Plain DCP:
`step-100/` with a `.metadata`. Megatron: `iter_0000100/` with `mp_rank_*` files or a `.metadata`.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contracts.errors import InputError
from contracts.json_text import parse_json
from training.file_digests import differing_digest

MANIFEST = "manifest.json"
NATIVE_FORMAT = "shardline-checkpoint-1"
TOKENS_KEY = "consumed_tokens"
TRACKER = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"^(?:step-(?P<step>\d+)|iter_(?P<iteration>\d+))$")


@dataclass(frozen=True)
class CheckpointInfo:
    """What the `manifest.json` of a native step folder holds.

    Args:
        step: Optimizer updates done.
        consumed_samples: Rows used so far: the whole position in the data.
        seq_length: Tokens of a row.
        model: `ModelConfig` as plain data, vocabulary size included.
        layout: `LayoutConfig` that wrote it; any other can read it.
        has_optimizer: `optim.<name>.exp_avg` and `optim.<name>.exp_avg_sq` are there.
        parameters: Canonical name to shape, as stored.
        files: File name to {"bytes", "xxh3_128" or "sha256"}.
        dtype: Of the stored tensors.
        extra: More facts, such as the seed or where the weights came from.
    """

    step: int
    consumed_samples: int
    seq_length: int
    model: Mapping[str, Any]
    layout: Mapping[str, Any]
    has_optimizer: bool
    parameters: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dtype: str = "float32"
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def consumed_tokens(self) -> int:
        tokens = self.extra.get(TOKENS_KEY)  # of a run whose rows had several lengths
        return tokens if isinstance(tokens, int) else self.consumed_samples * self.seq_length

    def to_json(self) -> str:
        data = {"format": NATIVE_FORMAT, **asdict(self), "consumed_tokens": self.consumed_tokens}
        return json.dumps(data, indent=1) + "\n"


@dataclass(frozen=True)
class StepFolder:
    """One checkpoint folder: its step, and why it cannot be used (None: it can)."""

    path: Path
    step: int
    problem: str | None


def clear_unfinished(root: Path) -> None:
    """Remove what interrupted saves left under `root`; a checkpoint that was being replaced gets its name back."""
    for replaced in root.glob("step-*.old"):
        folder = replaced.with_suffix("")
        if folder.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(folder)
    for unfinished in root.glob("step-*.tmp"):
        shutil.rmtree(unfinished)


def step_folder_name(step: int) -> str:
    return f"step-{step:08d}"


def is_step_folder_name(name: str) -> bool:
    """Say whether a folder's name is that of one checkpoint among several: `step-N` or `iter_N`."""
    return _STEP.match(name) is not None


def is_native(folder: Path) -> bool:
    """Say whether a folder claims to be one native checkpoint; what its manifest is worth is not looked at."""
    try:
        data = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("format") == NATIVE_FORMAT


def read_info(folder: Path) -> CheckpointInfo:
    """Read the manifest of a native step folder.

    Raises:
        InputError: There is none, or it is no manifest of a known format.
    """
    path = folder / MANIFEST
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
        if data.pop("format") != NATIVE_FORMAT:
            raise InputError(f"{path}: not the manifest of a {NATIVE_FORMAT} checkpoint.")
        data.pop("consumed_tokens")
        data["parameters"] = {name: tuple(shape) for name, shape in data["parameters"].items()}
        info = CheckpointInfo(**data)
        _require_types(info)
        return info
    except FileNotFoundError:
        raise InputError(f"{folder}: no {MANIFEST}, so this is no finished native checkpoint.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a checkpoint manifest ({error}).") from error


def _require_types(info: CheckpointInfo) -> None:
    """Refuse values that no save writes, such as files outside the folder.

    Raises:
        ValueError: Says which.
    """
    for name in ("model", "layout", "parameters", "files", "extra"):
        if not isinstance(getattr(info, name), dict):
            raise ValueError(f"{name} is no group")
    for name in ("step", "consumed_samples", "seq_length"):
        if type(getattr(info, name)) is not int or getattr(info, name) < 0:
            raise ValueError(f"{name} is no count")
    for name, facts in info.files.items():
        if "/" in name or name in ("", ".", "..") or not isinstance(facts, dict):
            raise ValueError(f"the file {name!r} is not inside the checkpoint")


def list_checkpoints(root: Path, *, digests: bool = False) -> list[StepFolder]:
    """List the checkpoints under `root`, newest first, with what is wrong with each.

    Args:
        digests: Also read every file of a native checkpoint and compare its digest.
    """
    return [StepFolder(folder, step, _problem(folder, digests)) for step, folder in _newest_first(root)]


def _newest_first(root: Path) -> list[tuple[int, Path]]:
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        match = _STEP.match(folder.name)
        if match and folder.is_dir():
            found.append((int(match["step"] or match["iteration"]), folder))
    return sorted(found, reverse=True)


def find_latest(root: Path, *, digests: bool = False) -> tuple[StepFolder | None, list[str]]:
    """Find the newest whole checkpoint under `root`.

    Returns:
        The folder (None: there is no checkpoint at all), and one warning for each newer one that
        was passed over and for a tracker that names another step.

    Raises:
        InputError: There are checkpoints and none is whole; names each and why. Going on from
            nothing would throw a run away silently.
    """
    warnings: list[str] = []
    reasons: list[str] = []
    for step, folder in _newest_first(root):
        problem = _problem(folder, digests)
        if problem is None:
            return StepFolder(folder, step, None), warnings + _tracker_warning(root, step)
        warnings.append(f"checkpoint {folder.name} (step {step}) is passed over: {problem}")
        reasons.append(f"{folder.name}: {problem}")
    if reasons:
        raise InputError(
            f"{root}: no checkpoint is whole ({'; '.join(reasons)}). Restore one, or remove these folders "
            "to start from step 0."
        )
    return None, warnings


def resolve_step_folder(path: Path) -> Path:
    """Return `path` if it is a checkpoint folder itself, else the newest whole one under it.

    Raises:
        InputError: There is none, or it is damaged.
    """
    if (path / MANIFEST).is_file() and _STEP.match(path.name):
        problem = _problem(path, False)
        if problem:
            raise InputError(f"{path}: {problem}.")
        return path
    if is_native(path):
        return path
    latest, _ = find_latest(path)
    if latest is None:
        raise InputError(f"{path}: holds no checkpoint (no step-* or iter_* folder).")
    return latest.path


def _tracker_warning(root: Path, step: int) -> list[str]:
    tracker = root / TRACKER
    named = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else str(step)
    return [] if named == str(step) else [f"{TRACKER} names {named}; the newest whole checkpoint is {step}"]


def _problem(folder: Path, digests: bool) -> str | None:
    if folder.name.startswith("iter_"):
        return _megatron_problem(folder)
    if (folder / MANIFEST).is_file():
        return native_problem(folder, digests)
    if re.match(r"^step-\d{8}$", folder.name):
        return f"it has no {MANIFEST}, so its save did not finish"
    if not (folder / ".metadata").is_file():
        return "it has no .metadata, so its save did not finish"
    return None


def native_problem(folder: Path, digests: bool) -> str | None:
    """Say why a native step folder cannot be used; None if nothing is seen. `digests` reads every file."""
    try:
        info = read_info(folder)
    except InputError as error:
        return str(error)
    if re.fullmatch(r"step-\d{8}", folder.name) and folder.name != step_folder_name(info.step):
        return f"its manifest is that of step {info.step}, so the folder has been renamed"
    for name, facts in info.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != facts["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, and {facts['bytes']} were written"
        if digests and (digest := differing_digest(path, facts)) is not None:
            return f"{name} is damaged (its {digest} differs from the one written down)"
    return None


def _megatron_problem(folder: Path) -> str | None:
    files = sorted(folder.glob("mp_rank_*/*.pt"))
    if not files:
        return None if (folder / ".metadata").is_file() else "it holds neither mp_rank_*/*.pt files nor a .metadata"
    for path in files:
        problem = torch_file_problem(path)
        if problem:
            return f"{path.relative_to(folder)} {problem}"
    return None


def torch_file_problem(path: Path) -> str | None:
    """Say why a file of `torch.save` is not whole, without unpickling; None if nothing is seen."""
    with path.open("rb") as file:
        start = file.read(2)
    if start == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                return None if archive.namelist() else "is an empty archive"
        except (zipfile.BadZipFile, OSError) as error:
            return f"is cut off or damaged ({error})"
    # Files of torch before 1.6 start as a pickle of protocol 2.
    return None if start == b"\x80\x02" else "is not a file of torch.save"
