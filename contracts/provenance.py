"""Who made an artifact, where and with what: recorded in the manifest, never part of the identity."""

import contextlib
import hashlib
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from contracts.lease import user_name

_PACKAGES = ("shardline", "torch", "numpy", "tokenizers", "pyarrow", "transformer-engine")
_SECRET = re.compile(r"(^|[-_.])(token|password|passwd|secret|api[-_]?key|access[-_]?key|credentials?)$", re.I)
_VOCABULARY = re.compile(r"(^|[-_.])(eod|eos|bos|pad|unk|sep|cls|mask|prefix)[-_]token$", re.I)


def provenance() -> dict[str, Any]:
    """Record commit, versions, host, user and command line, without secrets."""
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "host": socket.gethostname(),
        "user": user_name(),
        "command": without_secrets([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "packages": packages,
        "commit": _commit(Path(__file__).resolve().parent.parent),
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Replace by *** the values of arguments whose name says secret, and passwords in addresses."""
    result: list[str] = []
    is_value_of_secret = False
    for text in arguments:
        key, equals, _ = text.partition("=")
        is_secret = is_secret_name(key)
        if is_value_of_secret and not text.startswith("-"):
            result.append("***")
        elif is_secret and equals:
            result.append(f"{key}=***")
        else:
            result.append(re.sub(r"://[^/@\s]+@", "://***@", text))
        is_value_of_secret = is_secret and not equals and key.startswith("-")
    return result


def is_secret_name(name: str) -> bool:
    """Tell names such as `hub_token` or `--password` from `eos_token` and `shard_tokens`."""
    return bool(_SECRET.search(name)) and not _VOCABULARY.search(name)


def masked(config: Any) -> Any:
    """Replace by *** the values of settings whose name says secret, at any depth."""
    if isinstance(config, Mapping):
        return {key: "***" if value and is_secret_name(str(key)) else masked(value) for key, value in config.items()}
    return [masked(item) for item in config] if isinstance(config, list | tuple) else config


def _commit(root: Path) -> str | None:
    """Name the commit of the code; with uncommitted changes also a digest of them."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "diff", "HEAD")
    if commit is None or not changes:
        return commit
    return f"{commit}-dirty-{hashlib.sha256(changes.encode()).hexdigest()[:12]}"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
