"""The stages by name, for the command line and the flows. Importing this imports no heavy package."""

from typing import Any

from contracts.configuration import Settings
from contracts.errors import ConfigError
from contracts.stage import Stage

STAGES = (
    *("corpus", "clean", "tokenizer", "ingest", "import", "merge", "split", "index"),
    *("pretrain", "reshape", "evaluate", "report", "data-card"),
)


def stage_named(name: str, settings: Settings | None = None) -> Stage[Any]:
    """Return a stage; `settings` decide what a reshape makes: a native checkpoint or an exported model."""
    from conversion.config import ReshapeConfig
    from conversion.stage import RESHAPE, stage_for
    from evaluation.stage import DATA_CARD, EVALUATE, REPORT
    from preprocessing.stages import CLEAN, CORPUS, IMPORT, INDEX, INGEST, MERGE, SPLIT, TOKENIZER
    from training.stage import PRETRAIN

    if isinstance(settings, ReshapeConfig):
        return stage_for(settings)
    stages = (
        CORPUS,
        CLEAN,
        TOKENIZER,
        INGEST,
        IMPORT,
        MERGE,
        SPLIT,
        INDEX,
        PRETRAIN,
        RESHAPE,
        EVALUATE,
        REPORT,
        DATA_CARD,
    )
    found: dict[str, Stage[Any]] = {stage.name: stage for stage in stages}
    if name not in found:
        raise ConfigError(f"{name!r} is no stage. Stages: {', '.join(STAGES)}.")
    return found[name]
