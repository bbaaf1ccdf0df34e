"""Settings of the evaluation and report stages."""

from pydantic import Field, PositiveInt

from contracts.configuration import Settings, execution


class EvaluateConfig(Settings):
    """Measure a checkpoint on held-out documents, at the checkpoint's own layout."""

    checkpoint: str | None = execution(None, description="Checkpoint to measure, where no artifact is given as input.")
    step: int | None = Field(None, ge=0, description="Step to measure. Empty: the newest good one.")
    tasks: tuple[str, ...] = Field(("perplexity",), description="What to measure: perplexity.")
    data: str | None = execution(
        None,
        description="Dataset artifact, .bin/.idx prefix or text (JSONL, Parquet), where no dataset is an input.",
    )
    seq_length: PositiveInt | None = Field(
        None, description="Window in tokens. Empty: the length the model was trained at."
    )
    max_documents: PositiveInt | None = Field(None, description="Measure the first documents only. Empty: all.")
    batch_tokens: PositiveInt = execution(8192, description="Tokens in one forward pass; changes the speed only.")
    threads_per_rank: int = execution(0, ge=0, description="CPU threads per rank; 0 shares the cores evenly.")


class ReportConfig(Settings):
    """Draw what a chain measured: loss curve, per-subset plots, one self-contained HTML page."""

    title: str = Field("", description="Title of the page. Empty: the label of the run.")
