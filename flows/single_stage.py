"""Runs one stage for a command: live progress, then its summary or one JSON object."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from contracts.artifact import Artifact
from contracts.configuration import Settings
from contracts.stage import Stage
from contracts.store import ArtifactStore
from flows.options import headline, show, tell_rejected
from flows.references import artifact_at


def run_one(
    stage: Stage[Any],
    settings: Settings,
    store: ArtifactStore,
    *,
    inputs: Mapping[str, Artifact] | None = None,
    as_json: bool = False,
    track: bool = False,
    hints: Sequence[str] = (),
) -> Artifact:
    """Run one stage with live progress, then print its summary or one JSON object."""
    from flows import engine
    from flows.recording import Recorder
    from flows.terminal import TerminalProgress, error_console

    console = error_console()
    label = store.output.resolve().name if store.output is not None else stage.name
    step = engine.Step(stage.name, stage, settings, label=label, given=dict(inputs or {}))
    recorder = Recorder(store, pipeline=label, is_on=track)
    started = time.monotonic()
    was_done = True

    def conduct(planned: engine.Planned, build: engine.Build) -> Artifact:
        nonlocal was_done
        was_done = planned.action == "skip"
        with TerminalProgress(stage.name, console) as progress:
            return recorder.conduct(planned, lambda: build(progress))

    artifact = engine.run([step], store, conduct=conduct)[stage.name]
    if as_json:
        files = [{"path": f.path, "bytes": f.size_bytes, "sha256": f.sha256} for f in artifact.manifest.files]
        head = {"artifact": artifact.name, "kind": artifact.kind, "path": str(artifact.path)}
        show({**artifact.summary, **head, "fingerprint": artifact.fingerprint, "files": files})
        return artifact
    for key, value in artifact.summary.items():
        if not isinstance(value, dict | list):
            print(f"{key:<24} {f'{value:.6g}' if isinstance(value, float) else value}")
    for name, counts in artifact.summary.get("subsets", {}).items():
        if isinstance(counts, dict) and "tokens" in counts:
            print(f"  {name:<22} documents {counts['documents']}  tokens {counts['tokens']}")
    tell_rejected(artifact, print)
    for key, text in headline(artifact).items():
        print(f"{key:<24} {text}")
    for name, group in artifact.summary.get("metrics", {}).get("subsets", {}).items():
        print(f"  {name:<22} " + "  ".join(f"{key} {value:.6g}" for key, value in group.items()))
    how = "done already" if was_done else f"{time.monotonic() - started:.1f} s"
    print(f"{artifact.path}  ({how}; fingerprint {artifact.fingerprint[:12]})")
    for hint in hints:
        print(hint.format(path=artifact.path))
    return artifact


def built_on_the_way(
    stage: Stage[Any],
    settings: Settings,
    store: ArtifactStore,
    *,
    inputs: Mapping[str, Artifact] | None = None,
    label: str,
) -> Artifact:
    """Build what a command needs first, in the store and with its progress shown."""
    from flows.terminal import TerminalProgress, error_console

    with TerminalProgress(stage.name, error_console()) as progress:
        return stage.run(settings, inputs=inputs, store=ArtifactStore(store.root), progress=progress, label=label)


Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset", help="Dataset artifacts, or prefixes of .bin/.idx; several may follow.", metavar="DIR..."
    ),
]


def datasets_among(
    references: Sequence[str] | None, store: ArtifactStore
) -> tuple[dict[str, Artifact], list[str] | None]:
    """Artifacts become inputs; if any reference is a plain pair or a folder of pairs, all are passed as paths."""
    if not references:
        return {}, None
    found: list[Artifact | None] = []
    for text in references:
        found.append(None if holds_pairs(text) else artifact_at(text, store, ("dataset",)))
    if any(item is None for item in found):
        pairs = zip(references, found, strict=True)
        return {}, [text if item is None else str(item.path) for text, item in pairs]
    return {f"dataset{n}": item for n, item in enumerate(found) if item is not None}, None


def holds_pairs(text: str) -> bool:
    """Tell a plain .bin/.idx pair, or a folder of them, from an artifact or text."""
    from preprocessing.dataset.token_dataset import pair_files

    return any(file.is_file() for file in pair_files(text).values())
