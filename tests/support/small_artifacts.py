"""Tiny artifacts for tests of the contracts: a chain of six kinds, made in milliseconds."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.configuration import Settings, added, execution
from contracts.fingerprint import Recipe
from contracts.stage import Stage
from contracts.store import ArtifactStore, Workspace


class OptimizerSettings(Settings):
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)


class SampleSettings(Settings):
    num_layers: int = 2
    name: str = "gpt"
    optimizer: OptimizerSettings = OptimizerSettings()
    num_workers: int = execution(1, description="Processes.")
    dropout: float = added(0.0, description="Of a later release.")


def write_settings(settings: SampleSettings, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    (workspace.path / "data.bin").write_text(settings.model_dump_json(exclude={"num_workers"}))
    return {"num_layers": settings.num_layers}


SAMPLE = Stage(name="sample", version=1, kind="dataset", settings=SampleSettings, work=write_settings)


def recipe_of(stage: str = "ingest", inputs: Mapping[str, Artifact] | None = None, **config: Any) -> Recipe:
    return Recipe(stage, 1, config, {name: item.fingerprint for name, item in (inputs or {}).items()})


def make(
    store: ArtifactStore,
    kind: str,
    stage: str,
    inputs: Mapping[str, Artifact] | None = None,
    *,
    summary: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    label: str = "",
    config: Mapping[str, Any] | None = None,
) -> Artifact:
    recipe = recipe_of(stage, inputs, **(config or {}))
    return store.make(
        kind, label or stage, recipe, write(files or {"data.bin": stage}, summary), config=config, inputs=inputs
    )


def write(files: Mapping[str, str], summary: Mapping[str, Any] | None = None) -> Callable[[Workspace], Any]:
    def work(workspace: Workspace) -> Mapping[str, Any]:
        for name, text in files.items():
            target = workspace.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(target.name + ".tmp")
            temporary.write_text(text)
            os.replace(temporary, target)  # noqa: PTH105
        return summary or {}

    return work


def metric_lines(num_steps: int, *, first: int = 1) -> str:
    lines = (
        {"step": step, "time": 1_790_000_000 + step, "loss_nats": 5 - step / 100, "learning_rate": 1e-3}
        for step in range(first, first + num_steps)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def make_chain(store: ArtifactStore) -> dict[str, Artifact]:
    """Make corpus, tokenizer, dataset, index, checkpoint, reshaped checkpoint, evaluation."""
    corpus = make(store, "corpus", "corpus", summary={"documents": 3})
    tokenizer = make(store, "tokenizer", "tokenizer", {"corpus": corpus})
    dataset = make(store, "dataset", "ingest", {"corpus": corpus, "tokenizer": tokenizer}, summary={"tokens": 7})
    index = make(store, "index", "index", {"dataset": dataset})
    checkpoint = make(
        store,
        "checkpoint",
        "pretrain",
        {"index": index, "tokenizer": tokenizer},
        label="gpt-1.3b",
        summary={"final_loss_nats": 3.5, "step": 150},
        files={"weights.bin": "w", "metrics.jsonl": metric_lines(150)},
        config={"optimizer": {"lr": 1e-3}, "long_text": "x" * 7000, "hub_token": "hf_secret"},
    )
    reshaped = make(store, "checkpoint", "reshape", {"checkpoint": checkpoint}, label="gpt-1.3b-tp2")
    evaluation = make(
        store,
        "evaluation",
        "evaluate",
        {"checkpoint": reshaped, "dataset": dataset},
        summary={"metrics": {"acc,none": 0.5, "all": {"bits_per_byte": 1.25}}, "documents": 3},
    )
    names = ("corpus", "tokenizer", "dataset", "index", "checkpoint", "reshaped", "evaluation")
    return dict(zip(names, (corpus, tokenizer, dataset, index, checkpoint, reshaped, evaluation), strict=True))


def folder_names(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir())
