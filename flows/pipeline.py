"""One YAML file describes a chain; here it becomes settings, and the settings become steps.

The sections are the stages' own settings. What a section leaves out falls away: without `corpus`
and `clean` the text is read from `ingest.sources`, without `tokenizer` from `ingest.tokenizer`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from contracts.configuration import Settings, execution, load_yaml, validated, with_overrides
from conversion.config import ReshapeConfig
from evaluation.config import EvaluateConfig, ReportConfig
from flows.engine import Step
from flows.paths import PATHS, with_absolute_paths
from preprocessing.cleaning.config import CleanConfig
from preprocessing.config import CorpusConfig, IngestConfig, TokenizerConfig
from training.config import PretrainConfig


class ReshapeTarget(ReshapeConfig):
    """One target of the chain's reshape section."""

    name: str = execution(
        ..., description="Name of the target in this chain, as in reshape.NAME.", pattern=r"^[A-Za-z0-9_-]+$"
    )


class ChainEvaluateConfig(EvaluateConfig):
    """How the chain measures its checkpoints, and which of them."""

    of: tuple[str, ...] | None = execution(
        None, description="Which to measure: pretrain and names of reshape targets. Empty: all."
    )


class TrackingConfig(Settings):
    """Where the lineage is projected to."""

    is_on: bool = execution(True, description="Write runs, datasets and models to MLflow as stages finish.")
    uri: str | None = execution(
        None, description="MLflow address. Empty: MLFLOW_TRACKING_URI, else an sqlite file in the store."
    )
    experiment: str = execution("shardline", description="MLflow experiment; `lineage sync --experiment` names it too.")


class PipelineConfig(Settings):
    """A whole chain, from text to report."""

    name: str = execution(
        "chain", description="Name of the chain; artifacts and runs carry it.", pattern=r"^[A-Za-z0-9._-]+$"
    )
    store: str = execution("store", description="Folder of the artifact store, relative to this file.")
    tracking: TrackingConfig = execution(TrackingConfig(), description="MLflow projection.")
    corpus: CorpusConfig | None = Field(None, description="Text in Pile form with a held-out part.")
    clean: CleanConfig | None = Field(None, description="What is left out of the corpus, or of its own sources.")
    tokenizer: TokenizerConfig | None = Field(None, description="Tokenizer trained on the corpus.")
    ingest: IngestConfig = Field(default_factory=IngestConfig, description="Tokens in .bin/.idx shards.")
    heldout: IngestConfig | None = Field(
        None,
        description="How the held-out text is tokenized. Empty: as ingest, from the corpus' held-out part.",
    )
    pretrain: PretrainConfig | None = Field(None, description="The training run.")
    reshape: tuple[ReshapeTarget, ...] = Field((), description="Other layouts and formats of the checkpoint.")
    evaluate: ChainEvaluateConfig | None = Field(None, description="What is measured on the held-out text.")
    report: ReportConfig | None = Field(None, description="Plots and one HTML page.")

    @model_validator(mode="after")
    def _is_joined(self) -> Self:
        if self.corpus is None and self.clean is None and not self.ingest.sources:
            raise ValueError("there is no text: give a corpus section, or ingest.sources.")
        if self.clean is not None:
            self._check_clean(self.clean)
        if self.tokenizer is None and self.ingest.tokenizer is None:
            raise ValueError("there is no tokenizer: give a tokenizer section, or ingest.tokenizer with a path.")
        if self.pretrain is not None and self.pretrain.datasets:
            raise ValueError(
                "pretrain.datasets is set, and in a chain the model is trained on what ingest makes. Leave it out, or "
                "train on several datasets with  shardline pretrain --dataset A B --config FILE."
            )
        if self.evaluate is not None and self.evaluate.data is not None and self._has_heldout():
            raise ValueError("evaluate.data and held-out text are both given. Keep one.")
        given = [f"reshape.{target.name}" for target in self.reshape if target.checkpoint is not None]
        given += ["evaluate"] if self.evaluate is not None and self.evaluate.checkpoint is not None else []
        if given:
            raise ValueError(f"{given[0]}.checkpoint is set, and in a chain it is what pretrain makes. Leave it out.")
        if self.pretrain is None and (self.reshape or self.evaluate or self.report):
            raise ValueError("reshape, evaluate and report need a pretrain section.")
        if self.evaluate and not self._has_heldout() and self.evaluate.data is None:
            raise ValueError(
                "evaluate has no held-out text: give corpus.heldout_fraction above 0, a heldout section with sources, "
                "or evaluate.data."
            )
        names = [target.name for target in self.reshape]
        if len(set(names)) < len(names):
            raise ValueError(f"two reshape targets have one name: {', '.join(sorted(names))}.")
        unknown = sorted(set(self.evaluate.of or ()) - {"pretrain", *names}) if self.evaluate else []
        if unknown:
            raise ValueError(f"evaluate.of names {', '.join(unknown)}; there are: {', '.join(['pretrain', *names])}.")
        return self

    def _check_clean(self, clean: CleanConfig) -> None:
        if self.corpus is None and not clean.sources:
            raise ValueError("clean has nothing to clean: give a corpus section, or clean.sources.")
        if self.corpus is not None and clean.sources:
            raise ValueError("clean.sources and a corpus section are both given. Keep one.")
        if not clean.has_steps:
            raise ValueError("clean asks for no step: set clean.exact, minhash, quality or another, or leave it out.")

    def _has_heldout(self) -> bool:
        if self.heldout is not None and self.heldout.sources:
            return True
        return self.corpus is not None and self.corpus.heldout_fraction > 0


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read a pipeline file; paths in it are relative to its folder.

    Raises:
        ConfigError: The file or a setting is wrong; names file, line, setting, value and cure.
    """
    document = with_overrides(load_yaml(path), overrides)
    document.data.setdefault("store", "store")
    named = [f"{section}.{key}" for section, keys in PATHS.items() for key in keys]
    return validated(PipelineConfig, with_absolute_paths(document, path.resolve().parent, ["store", *named]))


def steps_of(config: PipelineConfig) -> list[Step]:
    """Return the steps of a chain in an order in which each finds its inputs."""
    from preprocessing.stages import CLEAN, CORPUS, INGEST, TOKENIZER

    name = config.name
    steps: list[Step] = []
    inputs: dict[str, str] = {}
    if config.corpus is not None:
        steps.append(Step("corpus", CORPUS, config.corpus, label=name))
        inputs["corpus"] = "corpus"
    if config.clean is not None:
        steps.append(Step("clean", CLEAN, config.clean, _only(inputs, "corpus"), label=f"{name}-clean"))
        inputs["corpus"] = "clean"
    if config.tokenizer is not None:
        trained_on = {} if config.tokenizer.load else _only(inputs, "corpus")
        steps.append(Step("tokenizer", TOKENIZER, config.tokenizer, trained_on, label=name))
        inputs["tokenizer"] = "tokenizer"
    from_corpus = inputs if not config.ingest.sources else _only(inputs, "tokenizer")
    steps.append(Step("ingest", INGEST, config.ingest, dict(from_corpus), label=name))
    if config._has_heldout():
        heldout = config.heldout or config.ingest.model_copy(update={"corpus_part": "heldout", "sources": ()})
        if heldout.tokenizer is None and config.tokenizer is None:
            heldout = heldout.model_copy(update={"tokenizer": config.ingest.tokenizer})
        source = inputs if not heldout.sources else _only(inputs, "tokenizer")
        steps.append(Step("heldout", INGEST, heldout, dict(source), label=f"{name}-heldout"))
    if config.pretrain is not None:
        steps += _after_training(config, config.pretrain)
    return steps


def _only(inputs: dict[str, str], *names: str) -> dict[str, str]:
    return {name: inputs[name] for name in names if name in inputs}


def _after_training(config: PipelineConfig, pretrain: PretrainConfig) -> list[Step]:
    from evaluation.stage import EVALUATE, REPORT
    from training.stage import PRETRAIN

    name = config.name
    steps = [Step("pretrain", PRETRAIN, pretrain, {"dataset0": "ingest"}, label=name)]
    native = {"pretrain": "pretrain"}  # what can be measured: name to the step with its native checkpoint
    for target in config.reshape:
        from conversion.stage import RESHAPE, stage_for

        settings = ReshapeConfig.model_validate(target.model_dump(exclude={"name"}))
        step = f"reshape.{target.name}"
        stage = stage_for(settings)
        steps.append(Step(step, stage, settings, {"checkpoint": "pretrain"}, label=f"{name}-{target.name}"))
        native[target.name] = step
        if stage.kind == "model" and _is_measured(config, target.name):
            # A foreign format is measured through its own files: read back, not taken from the source.
            back = f"reimport.{target.name}"
            steps.append(
                Step(back, RESHAPE, ReshapeConfig(), {"checkpoint": step}, label=f"{name}-{target.name}-native")
            )
            native[target.name] = back
    evaluations: dict[str, str] = {}
    if config.evaluate is not None:
        settings_of_all = EvaluateConfig.model_validate(config.evaluate.model_dump(exclude={"of"}))
        for target_name, source in native.items():
            if _is_measured(config, target_name):
                inputs = {"checkpoint": source} | ({"dataset": "heldout"} if config._has_heldout() else {})
                step = f"evaluate.{target_name}"
                steps.append(Step(step, EVALUATE, settings_of_all, inputs, label=f"{name}-{target_name}"))
                evaluations[f"evaluation.{target_name}"] = step
    if config.report is not None:
        inputs = {"checkpoint": "pretrain", "dataset": "ingest", **evaluations}
        steps.append(Step("report", REPORT, config.report, inputs, label=name))
    return steps


def _is_measured(config: PipelineConfig, name: str) -> bool:
    return config.evaluate is not None and (config.evaluate.of is None or name in config.evaluate.of)
