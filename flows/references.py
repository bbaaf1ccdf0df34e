"""What a user may write for an artifact: a path, a name, or a prefix of its fingerprint."""

from collections.abc import Mapping
from pathlib import Path

from contracts.artifact import MANIFEST, Artifact, read_artifact
from contracts.errors import ConfigError
from contracts.references import as_path
from contracts.store import ArtifactStore
from training.step_folders import is_native


def resolve_inputs(references: Mapping[str, str], store: ArtifactStore) -> dict[str, Artifact]:
    """Find the artifact of each reference.

    Raises:
        ConfigError: A reference fits nothing, or several artifacts.
    """
    return {name: store.find(reference) for name, reference in references.items()}


def artifact_at(reference: str, store: ArtifactStore, kinds: tuple[str, ...] = ()) -> Artifact | None:
    """Return the artifact that a reference names, or None for a path that holds something else.

    Raises:
        ConfigError: It names an artifact of another kind than asked for, or is neither path nor artifact.
    """
    path = as_path(reference)
    if path is not None and is_native(path):  # a step folder of a run, which has a manifest of its own kind
        return None
    if path is not None and (path / MANIFEST).is_file():
        artifact = read_artifact(path)
    elif path is not None or _is_pair(reference):
        return None
    else:
        artifact = store.find(reference)
    if kinds and artifact.kind not in kinds:
        article = "an" if artifact.kind[0] in "aeiou" else "a"
        raise ConfigError(f"{reference} is {article} {artifact.kind}; a {' or '.join(kinds)} is needed here.")
    return artifact


def _is_pair(reference: str) -> bool:
    """Tell the prefix of a .bin/.idx pair, as Megatron-LM writes it."""
    try:
        return bool(reference) and Path(f"{reference}.idx").expanduser().is_file()
    except (OSError, ValueError, RuntimeError):
        return False


def artifact_of(reference: str, store: ArtifactStore, kinds: tuple[str, ...]) -> Artifact:
    """Return the artifact that a reference names.

    Raises:
        ConfigError: It names none, or one of another kind.
    """
    artifact = artifact_at(reference, store, kinds)
    if artifact is None:
        raise ConfigError(f"{reference} is no artifact; a {' or '.join(kinds)} artifact is needed here.")
    return artifact
