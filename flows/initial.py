"""What `pretrain --from` names: a checkpoint to begin with, and what of its run holds where nothing else is said."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.configuration import load_yaml
from contracts.store import ArtifactStore
from flows.references import artifact_at

# Settings of the run before that a run which begins with its checkpoint takes over.
_KEPT = ("seq_length", "micro_batch_size", "global_batch_size", "precision")


def initial_checkpoint(
    reference: str, store: ArtifactStore, *, given: Mapping[str, Any], takes_model: bool
) -> tuple[dict[str, Artifact], list[str]]:
    """Find the checkpoint.

    Args:
        given: Settings of the new run's file; what stands there is not taken over.
        takes_model: Take the checkpoint's model too.

    Returns:
        The artifact as an input of the stage, if it is one; and settings as `-s` takes them.

    Raises:
        ConfigError: The reference names no checkpoint.
        InputError: It is damaged, or of another format.
    """
    from training.initial import INITIAL
    from training.step_choice import native_step_folder
    from training.step_folders import read_info

    artifact = artifact_at(reference, store, ("checkpoint",))
    path = artifact.path if artifact is not None else Path(reference)
    settings = [] if artifact is not None else [f"initial.checkpoint={json.dumps(str(path.resolve()))}"]
    info = read_info(native_step_folder(path, None)[0])
    before: dict[str, Any] = {"seq_length": info.seq_length}
    if artifact is not None:
        before |= {name: artifact.manifest.config[name] for name in _KEPT if name in artifact.manifest.config}
    settings += [f"{name}={json.dumps(value)}" for name, value in before.items() if name not in given]
    if takes_model and "model" not in given:
        settings += [f"model.{name}={json.dumps(value)}" for name, value in info.model.items() if value is not None]
    return ({INITIAL: artifact} if artifact is not None else {}), settings


def file_settings(config: Path | None) -> Mapping[str, Any]:
    """Return the settings of the stage that stand in a file, or in its section of a pipeline file."""
    if config is None:
        return {}
    data = load_yaml(config).data
    section = data.get("pretrain", data)
    return section if isinstance(section, dict) else {}
