"""Settings of the evaluation and report stages."""

from pydantic import Field, PositiveInt, field_validator

from contracts.configuration import Settings, added, execution
from training.config import DeviceSetting, Precision

TASKS = ("perplexity",)


class EvaluateConfig(Settings):
    """Measure a checkpoint on held-out documents, at the checkpoint's own layout."""

    checkpoint: str | None = execution(None, description="Native checkpoint folder, where no artifact is an input.")
    step: int | None = Field(None, ge=0, description="Step to measure. Empty: the newest good one.")
    tasks: tuple[str, ...] = Field(("perplexity",), min_length=1, description="What to measure: perplexity.")
    data: str | None = execution(
        None, description="Dataset artifact or .bin/.idx prefix, where no dataset is an input."
    )
    seq_length: PositiveInt | None = Field(
        None, description="Window in tokens. Empty: the length the model was trained at."
    )
    max_documents: PositiveInt | None = Field(None, description="Measure the first documents only. Empty: all.")
    ema: bool = added(False, description="Measure the moving average of the weights (optimizer.ema_decay).")
    precision: Precision = Field("float32", description="Arithmetic of the layers.")
    batch_tokens: PositiveInt = execution(8192, description="Tokens in one forward pass; changes the speed only.")
    data_parallel: PositiveInt = execution(1, description="Copies of the model that share the rows.")
    device: DeviceSetting = execution("auto", description="auto takes CUDA where every rank has a device of its own.")
    threads_per_rank: int = execution(0, ge=0, description="CPU threads per rank; 0 shares the cores evenly.")

    @field_validator("tasks")
    @classmethod
    def _are_known(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [task for task in tasks if task not in TASKS]
        if unknown:
            raise ValueError(f"there is no task {', '.join(unknown)}. Tasks: {', '.join(TASKS)}.")
        return tasks


class ReportConfig(Settings):
    """Draw what a chain measured: loss curve, per-subset plots, one self-contained HTML page."""

    title: str = Field("", description="Title of the page. Empty: the label of the run.")


class DataCardConfig(Settings):
    """Describe a dataset: subsets, sources, what was left out, lengths, some documents."""

    title: str = Field("", description="Title of the page. Empty: the label of the dataset.")
    samples: int = Field(3, ge=0, description="Documents to show on the page, chosen at random.")
