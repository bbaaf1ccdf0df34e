"""What `pretrain --from` names: a checkpoint to begin with, and the model that it holds."""

import json
from pathlib import Path

from contracts.artifact import Artifact
from contracts.configuration import load_yaml
from contracts.store import ArtifactStore
from flows.references import artifact_at


def initial_checkpoint(
    reference: str, store: ArtifactStore, *, takes_model: bool
) -> tuple[dict[str, Artifact], list[str]]:
    """Find the checkpoint.

    Args:
        takes_model: Take its model too.

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
    if takes_model:
        model = read_info(native_step_folder(path, None)[0]).model
        settings += [f"model.{name}={json.dumps(value)}" for name, value in model.items() if value is not None]
    return ({INITIAL: artifact} if artifact is not None else {}), settings


def has_model(config: Path | None) -> bool:
    """Say whether a settings file, or its section for the stage, has a model."""
    if config is None:
        return False
    data = load_yaml(config).data
    section = data.get("pretrain", data)
    return isinstance(section, dict) and "model" in section
