"""The sample indices of a run: of its training rows and of every validation set, as artifacts of their own."""

from collections.abc import Mapping
from typing import Any

from contracts.artifact import MANIFEST, Artifact, read_artifact
from contracts.errors import ConfigError
from contracts.files import user_path
from contracts.store import ArtifactStore
from contracts.workspace import Workspace
from preprocessing.config import IndexConfig
from preprocessing.samples.splits import parse_split
from training.config import PretrainConfig


def named_datasets(settings: PretrainConfig, inputs: Mapping[str, Artifact]) -> list[Artifact]:
    """The dataset artifacts; plain .bin/.idx prefixes have none."""
    found = [inputs[name] for name in sorted(inputs, key=_number) if name.startswith("dataset")]
    if found and settings.datasets:
        raise ConfigError("pretrain: both dataset artifacts and pretrain.datasets are given. Keep one.")
    if found:
        return found
    if not settings.datasets:
        raise ConfigError("pretrain has no dataset. Give one or more with --dataset, or set pretrain.datasets.")
    paths = [user_path(text) for text in settings.datasets]
    return [read_artifact(path) for path in paths if (path / MANIFEST).is_file()]


def _number(name: str) -> int:
    digits = name.removeprefix("dataset")
    return int(digits) if digits.isdigit() else 0


def training_index(settings: PretrainConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> Artifact:
    """Build the index of the run's rows, its own held-out ones included.

    Raises:
        ConfigError: The datasets do not give as many rows as the run needs.
    """
    curriculum = settings.curriculum
    mixtures = [{"samples": samples, "weights": weights} for samples, weights in curriculum.mixtures]
    mixture: dict[str, Any] = (
        {"phases": mixtures} if len(mixtures) > 1 else {"weights": mixtures[0]["weights"] if mixtures else None}
    )
    if settings.dataset_epochs is not None:
        mixture["epochs"] = settings.dataset_epochs
    asked = settings.valid_batches * settings.global_batch_size
    index = _build_index(
        _datasets_to_index(settings, inputs),
        inputs,
        workspace,
        **mixture,
        seq_length=settings.seq_length,
        subsets=settings.dataset_subsets,
        samples=curriculum.num_samples if settings.dataset_epochs is None else None,
        valid_samples=asked if _has_validation(settings) and not settings.valid_full else 0,
        test_samples=0,
        seed=settings.seed,
        split=settings.split,
        **_objective(settings),
    )
    available = int(index.summary["train_samples"])
    if available < curriculum.num_samples:
        steps = available // settings.global_batch_size
        raise ConfigError(
            f"pretrain.dataset_epochs {list(settings.dataset_epochs or ())} give {available} samples, and "
            f"{settings.train_steps} steps of {settings.global_batch_size} need {curriculum.num_samples}. "
            f"Set train_steps to {steps} or less."
        )
    return index


def validation_indices(
    settings: PretrainConfig, inputs: Mapping[str, Artifact], index: Artifact, workspace: Workspace
) -> dict[str, tuple[str, str]]:
    """Index and split of every validation set by name; the run's own held-out documents have the name ""."""
    if not settings.validates:
        return {}
    same: dict[str, Any] = {"seq_length": settings.seq_length, "seed": settings.seed, "test_samples": 0}
    same |= _objective(settings)
    found: dict[str, Artifact] = {}
    if settings.valid_full and _has_validation(settings):
        datasets = _datasets_to_index(settings, inputs)
        found[""] = _build_index(datasets, inputs, workspace, samples=0, split=settings.split, **same)
    elif _has_validation(settings):
        found[""] = index
    _refuse_other_tokenizers(settings, inputs)
    for name, path in settings.valid_sets.items():
        found[name] = _build_index((path,), {}, workspace, samples=0, split="0,100,0", **same)
    return {name: (str(item.path.resolve()), "valid") for name, item in found.items()}


def _refuse_other_tokenizers(settings: PretrainConfig, inputs: Mapping[str, Artifact]) -> None:
    from preprocessing.dataset.token_dataset import TokenDataset, refuse_mixed_tokenizers

    paths = [str(item.path) for item in named_datasets(settings, inputs)][:1] + list(settings.valid_sets.values())
    refuse_mixed_tokenizers([TokenDataset(path) for path in paths])


def _datasets_to_index(settings: PretrainConfig, inputs: Mapping[str, Artifact]) -> tuple[str, ...]:
    return () if inputs else settings.datasets


def _build_index(
    datasets: tuple[str, ...], inputs: Mapping[str, Artifact], workspace: Workspace, **settings: Any
) -> Artifact:
    from preprocessing.stages import INDEX

    store = ArtifactStore(workspace.store.root)  # the index has its own name, whatever --output says
    config = IndexConfig.model_validate({"datasets": datasets, **settings})
    return INDEX.run(config, inputs=inputs, store=store, progress=workspace.progress)


def _objective(settings: PretrainConfig) -> dict[str, Any]:
    """What samples are for, as the model's family needs it."""
    if settings.model.is_encoder_decoder:
        return {"objective": "t5", "t5": settings.t5_objective}
    if not settings.model.causal:
        return {"objective": "bert", "bert": settings.bert_objective}
    if settings.sft is not None:
        return {"objective": "sft", "sft": settings.sft}
    return {} if settings.fim is None else {"objective": "fim", "fim": settings.fim}


def _has_validation(settings: PretrainConfig) -> bool:
    return settings.validates and parse_split(settings.split)[1] is not None
