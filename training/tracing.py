"""From an optimizer step back to the documents that the model saw in it. Never imports torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.artifact import Artifact
from contracts.errors import InputError, ShardlineError
from contracts.store import ArtifactStore
from training.config import PretrainConfig
from training.schedules import step_samples

if TYPE_CHECKING:
    pass


def samples_of_step(run: Artifact, step: int) -> range:
    """Numbers of the rows of one step of a run: the data position is the rows used before it, at any layout.

    Args:
        step: From 1.
    """
    config = run.manifest.config
    rampup = config.get("rampup_batch_size")
    return step_samples(step, int(config["global_batch_size"]), tuple(rampup) if rampup else None)


def trace_samples_of(
    run: Artifact, samples: Sequence[int], store: ArtifactStore, *, with_text: bool = False
) -> list[dict[str, Any]]:
    """Say which parts of which source records training samples hold, in the order of their tokens.

    Returns:
        For each part: sample (the row), file, record (1-based line), subset, offset and length in tokens of the
        document, document; and text, when asked for.

    Raises:
        InputError: The run's index or datasets are gone.
    """
    from preprocessing.samples.gpt import GPTSamples
    from preprocessing.samples.trace import trace_samples
    from training.rows import CurriculumSamples

    found = []
    index = _index_of(run, store).path
    opened: Path | CurriculumSamples = index
    if run.manifest.config.get("phases"):
        curriculum = PretrainConfig.model_validate(run.manifest.config).curriculum
        opened = CurriculumSamples(GPTSamples(index), curriculum)
    for span in trace_samples(opened, list(samples)):
        row = {
            "sample": span.sample,
            "file": span.path,
            "record": span.line,
            "subset": span.subset,
            "document": span.document,
            "offset": span.first_token,
            "length": span.num_tokens,
        }
        found.append({**row, "text": span.text or ""} if with_text else row)
    return found


def _index_of(run: Artifact, store: ArtifactStore) -> Artifact:
    try:
        return store.find(str(run.summary["index_fingerprint"]))
    except ShardlineError as error:
        raise InputError(
            f"{run.name} read its samples through {run.summary['index']}, which is not in {store.root.absolute()}. "
            "Give --store if it lies in another one; or build it again with the index command and the run's settings."
        ) from error
