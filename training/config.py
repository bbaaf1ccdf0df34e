"""Settings of the pretraining stage, and the arithmetic that must hold between them.

Nothing here reads a file, starts a process or imports torch. Degrees of tensor and pipeline
parallelism are part of a run's identity, since its checkpoints are cut by them; data parallelism,
virtual stages, splits, micro-batch size and recomputation are not, because the global batch fixes the result.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from contracts.configuration import Settings, added, execution
from preprocessing.config import Split
from preprocessing.samples.objectives import BertConfig, FimConfig, SftConfig, T5Config
from training.curriculum import Curriculum, PhaseConfig
from training.initial_config import InitialConfig as InitialConfig
from training.layout_config import LayoutConfig as LayoutConfig
from training.layout_config import check_layout as check_layout
from training.layout_config import multiples
from training.model_config import ModelConfig as ModelConfig
from training.optimizer_config import OptimizerConfig as OptimizerConfig
from training.schedules import Schedule, batch_rows, step_samples
from training.stability_config import LossScaleConfig, StabilityConfig

if TYPE_CHECKING:
    from preprocessing.samples.t5_lengths import SpanLengths

Precision = Literal["float32", "bf16", "fp16", "float64"]
Fp8Recipe = Literal["current_scaling", "block_scaling", "mxfp8"]
FP8_MULTIPLE = {"current_scaling": 16, "block_scaling": 128, "mxfp8": 32}  # of sizes of products
DeviceSetting = Literal["auto", "cpu", "cuda"]
Recompute = Literal["none", "selective", "full"]

_SET_NAME = re.compile(r"[A-Za-z0-9_-]+")
IGNORE_INDEX = -100  # label of a position that gives no loss and no score, as in torch


class PretrainConfig(Settings):
    """One pretraining run."""

    habits: ClassVar[Mapping[str, str]] = {
        "train_iters": "train_steps",
        "max_steps": "train_steps",
        "save_interval": "checkpoint_interval",
        "sequence_length": "seq_length",
        "fp16": "precision",
        "bf16": "precision",
        "eval_interval": "valid_interval",
        "eval_iters": "valid_batches",
    }

    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    layout: LayoutConfig = Field(default_factory=LayoutConfig, description="How it is cut over ranks.")
    initial: InitialConfig = added(
        InitialConfig(), description="A checkpoint to begin with: continued pretraining, fine-tuning, a longer run."
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimizer and its schedule.")
    seq_length: PositiveInt = Field(512, description="Tokens per training row.")
    micro_batch_size: PositiveInt = execution(4, description="Rows per rank per forward pass.")
    global_batch_size: PositiveInt = Field(16, description="Rows per optimizer step over all ranks.")
    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = added(
        None,
        description="[start, increment, samples]: the batch grows from start to global_batch_size by increment, in "
        "equal shares of samples. Empty: it has global_batch_size rows from the first step on.",
    )
    train_steps: PositiveInt = Field(100, description="Optimizer steps of the run.")
    fim: FimConfig | None = added(
        None, description="Fill-in-the-middle rows for a causal model. Default: the next token of the text as it is."
    )
    sft: SftConfig | None = added(
        None,
        description="Supervised fine-tuning: rows of conversations, of which only what is said gives a loss; needs "
        "data ingested as turns. Default: plain text.",
    )
    bert: BertConfig | None = added(
        None,
        description="Rows of an encoder (bert, roberta): pairs, and what is masked. Default: pairs: nsp with "
        "model.pair_head, else none.",
    )
    t5: T5Config | None = added(None, description="Rows of an encoder and a decoder: spans that are taken out.")
    decoder_seq_length: PositiveInt | None = added(
        None,
        description="Tokens of a decoder's row. Default: what rows of seq_length need, up to a multiple of 16.",
    )
    phases: tuple[PhaseConfig, ...] = added(
        (),
        description="Mixtures and row lengths that change on the way, such as [{steps: 1000, seq_length: 512}, {}]; "
        "seq_length is then the longest. No sample is repeated or lost.",
    )
    reset_position_ids: bool = added(False, description="Positions count from 0 in every document of a row.")
    reset_attention_mask: bool = added(False, description="Tokens see only the document of the row that they are in.")
    eod_mask_loss: bool = added(
        False, description="No loss where the last token of a document would predict the first of the next."
    )
    z_loss: float = added(
        0.0,
        ge=0,
        description="Weight of the squared logarithm of the softmax's denominator in what is minimized, such as 1e-4; "
        "the reported loss is without it.",
    )
    precision: Precision = Field(
        "float32", description="Arithmetic of the layers; masters and optimizer are float32 with bf16 and fp16 too."
    )
    fp8: Fp8Recipe | None = added(
        None,
        description="Products of the blocks in 8 bits by this recipe of Transformer Engine; needs model.backend: te "
        "and precision: bf16. current_scaling: Hopper and later; block_scaling: Hopper; mxfp8: Blackwell.",
    )
    loss_scale: LossScaleConfig = added(LossScaleConfig(), description="Dynamic loss scale of precision: fp16.")
    stability: StabilityConfig = added(StabilityConfig(), description="What a step with wrong numbers does.")
    recompute: Recompute = execution(
        "none", description="Activations computed again in backward: none, all but matrix products, or whole blocks."
    )
    recompute_layers: tuple[NonNegativeInt, ...] | None = execution(
        None, description="Numbers of the layers that recompute is for, such as [0, 1, 2]; the others keep all."
    )
    compile: bool = execution(
        False, description="Compile each block with torch.compile; costs up to minutes at the start."
    )
    seed: int = Field(1234, ge=0, description="Seed of initial weights, sample order and dropout.")
    split: Split = Field("98,2,0", description="Weights of train, valid and test, by position in the dataset.")
    dataset_weights: tuple[float, ...] | None = Field(
        None, description="Share of each dataset in a blend; default: by their sizes."
    )
    dataset_epochs: tuple[float, ...] | None = added(
        None, description="How often each dataset is read, in place of weights; 0.5 is half of it. Bounds train_steps."
    )
    dataset_subsets: tuple[str, ...] = added(
        (),
        description="Take these subsets of the one dataset as if each were a dataset: weights and epochs go by them.",
    )
    datasets: tuple[str, ...] = execution((), description="Dataset artifacts, when not given as inputs.")
    valid_batches: int = Field(
        4, ge=0, description="Global batches of a validation loss, the same ones every time; 0 is off."
    )
    valid_full: bool = added(False, description="Validate on all samples there are, in place of valid_batches.")
    valid_interval: int = execution(
        0, ge=0, description="Steps between validation losses while training; 0 validates at the end only."
    )
    valid_sets: dict[str, str] = execution(
        {},
        description="More validation sets: name to dataset artifact or .bin/.idx prefix, such as {wiki: data/wiki}; "
        "each has a line valid_loss_nats/NAME.",
    )
    checkpoint_interval: PositiveInt = execution(100, description="Steps between checkpoints.")
    keep_last: PositiveInt = execution(2, description="Checkpoints kept while training; the last one always is.")
    async_save: bool = execution(
        False,
        description="Checkpoints are copied in memory and written behind training; the copy is as large as the "
        "rank's part of a checkpoint.",
    )
    save_retries: int = execution(
        3, ge=0, description="Times that a checkpoint the disk refused is written again before it is given up."
    )
    save_retry_s: float = execution(10.0, ge=0, description="Seconds before the first of them; each wait is doubled.")
    on_save_error: Literal["continue", "stop"] = execution(
        "continue",
        description="What giving a checkpoint up does to the run. The last checkpoint of a run is never given up.",
    )
    log_interval: PositiveInt = execution(1, description="Steps between lines of metrics.jsonl.")
    subset_losses: bool = execution(
        False, description="Log the loss of each subset of the data too, as loss_nats/SUBSET, by predicted token."
    )
    profile_steps: tuple[PositiveInt, PositiveInt] | None = execution(
        None,
        description="[first, last] step, counted from the start, of which a Chrome trace is written under logs/.",
    )
    threads_per_rank: int = execution(0, ge=0, description="CPU threads per rank; 0 shares the cores evenly.")
    device: DeviceSetting = execution("auto", description="auto takes CUDA where every rank has a device of its own.")
    stop_grace_s: PositiveInt = execution(
        120, description="Seconds that ranks get to save when the run is interrupted, before they are ended."
    )
    hang_timeout_s: int = execution(
        1200,
        ge=0,
        description="When no rank gets on for so many seconds, the stacks of all are written to logs/rank-*.stacks and "
        "the run ends; longer than the longest step, save or start. 0 waits for ever.",
    )
    timeout_s: PositiveInt = execution(1800, description="Seconds a rank waits for its peers before it gives up.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_objective()
        curriculum = self.curriculum
        for length in sorted({phase.seq_length for phase in curriculum.phases}):
            check_layout(self.model, self.layout, seq_length=length, decoder_seq_length=self.decoder_length or None)
        self._check_batch()
        if self.rampup_batch_size is not None and any(phase.parts > 1 for phase in curriculum.phases):
            raise ValueError("rampup_batch_size does not go with shorter rows in phases: a batch must keep its rows.")
        if self.dataset_epochs is not None and curriculum.mixtures:
            raise ValueError("dataset_epochs and dataset_weights exclude each other: give one of them.")
        for name in self.valid_sets:
            if not _SET_NAME.fullmatch(name):
                raise ValueError(f"valid_sets: {name!r} is no name. Use letters, digits, - and _.")
        model = self.model
        if self.seq_length > model.max_position_embeddings:
            raise ValueError(
                f"seq_length ({self.seq_length}) is above model.max_position_embeddings "
                f"({model.max_position_embeddings}). Raise max_position_embeddings, or shorten seq_length."
            )
        self._check_recompute_layers()
        if self.compile and self.recompute == "selective":
            raise ValueError(
                "compile: true does not go with recompute: selective, since a compiled block has no single products. "
                "Use recompute: none or full."
            )
        if self.layout.schedule != "1f1b":
            self._check_split_backward(self.layout.schedule)
        if self.fp8 is not None:
            self._check_fp8(self.fp8)
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(f"profile_steps {list(self.profile_steps)} ends before it begins.")
        if self.subset_losses and not model.causal:
            raise ValueError(f"subset_losses is for causal models, and model.family is {model.family}. Leave it out.")
        schedule = self.schedule
        unit = "samples" if self.optimizer.counts_samples else "steps"
        if schedule.warmup >= schedule.decay_end:
            raise ValueError(
                f"optimizer.warmup_{unit} ({schedule.warmup}) leaves nothing of the {schedule.decay_end} {unit} to "
                f"decay over. Use at most {schedule.decay_end - 1}."
            )
        return self

    def _check_recompute_layers(self) -> None:
        layers = self.recompute_layers
        if layers is None:
            return
        if self.recompute == "none":
            raise ValueError("recompute_layers says which layers to compute again, and recompute is none. Set it too.")
        if wrong := [layer for layer in layers if layer >= self.model.total_layers]:
            raise ValueError(
                f"recompute_layers {list(layers)}: there is no layer {wrong[0]}; they are numbered 0 to "
                f"{self.model.total_layers - 1}."
            )

    def _check_split_backward(self, schedule: str) -> None:
        """Refuse what cannot go backward in two halves."""
        wrong = {
            "recompute: selective": self.recompute == "selective",
            "compile: true": self.compile,
            "model.backend: te": self.model.backend == "te",
        }
        if self.model.is_encoder_decoder:
            raise ValueError(
                f"layout.schedule: {schedule} does not go with model.family: {self.model.family}: all layers of a "
                "stack share one table of relative positions, and the second half of backward would go through all of "
                "them again for it. Use schedule: 1f1b."
            )
        for setting in (name for name, is_set in wrong.items() if is_set):
            raise ValueError(
                f"layout.schedule: {schedule} goes backward in two halves, and {setting} allows one. "
                f"Use schedule: 1f1b, or leave {setting.partition(':')[0]} out."
            )

    def _check_fp8(self, recipe: Fp8Recipe) -> None:
        if self.model.backend != "te" or self.precision != "bf16":
            raise ValueError(
                f"fp8: {recipe} needs model.backend: te and precision: bf16 (now {self.model.backend} and "
                f"{self.precision}). Set both, or leave fp8 out."
            )
        model, tp, multiple = self.model, self.layout.tensor_parallel, FP8_MULTIPLE[recipe]
        rows = self.micro_batch_size * self.seq_length // self.layout.context_parallel
        sizes = {
            "model.hidden_size": model.hidden_size,
            "model.ffn_hidden_size / layout.tensor_parallel": model.ffn_hidden_size // tp,
            "queries, keys and values / layout.tensor_parallel": model.qkv_size // tp,
            "micro_batch_size x seq_length": rows // (tp if self.layout.sequence_parallel else 1),
        }
        for name, size in sizes.items():
            if size % multiple:
                raise ValueError(
                    f"fp8: {recipe} needs products whose sizes are multiples of {multiple}, and {name} is {size}. "
                    f"Nearest: {multiples(size, multiple)}; or leave fp8 out."
                )

    def _check_batch(self) -> None:
        if self.rampup_batch_size is not None:
            self._check_rampup(*self.rampup_batch_size)
        self._check_rows("global_batch_size", self.global_batch_size)

    def check_batches_after(self, consumed_samples: int) -> None:
        """Check the batches of a ramp-up that are still to come; a run past the small ones may have more ranks.

        Raises:
            ValueError: A size does not fill the layout; has the numbers.
        """
        first = self.batch_rows(consumed_samples)
        for rows in self.batch_sizes:
            if rows >= first:
                self._check_rows("the batch of rampup_batch_size", rows)

    def _check_rows(self, name: str, rows: int) -> None:
        micro, dp = self.micro_batch_size, self.layout.data_parallel
        per_pass, stages = micro * dp, self.layout.pipeline_parallel
        if rows % per_pass:
            raise ValueError(
                f"{name} ({rows}) / (micro_batch_size ({micro}) x layout.data_parallel ({dp}) = {per_pass}) "
                f"leaves a remainder of {rows % per_pass}. "
                f"Nearest {name}: {multiples(rows, per_pass)}; or change micro_batch_size."
            )
        passes = rows // per_pass
        if passes < stages:
            raise ValueError(
                f"{name} ({rows}) / ({micro} x {dp}) gives {passes} micro-batches, and "
                f"layout.pipeline_parallel ({stages}) needs at least {stages}. "
                f"Use {name} {stages * per_pass}, or a smaller micro_batch_size."
            )
        if self.layout.goes_in_rounds and not _interleaves(passes, stages):
            below = next(n for n in range(passes, stages - 1, -1) if _interleaves(n, stages))
            above = next(n for n in range(passes, 2 * passes + 1) if _interleaves(n, stages))
            zero_bubble = self.layout.schedule == "zero_bubble"
            virtual = f"layout.virtual_pipeline ({self.layout.virtual_pipeline})"
            raise ValueError(
                f"{name} ({rows}) / ({micro} x {dp}) gives {passes} micro-batches; with "
                f"{'layout.schedule: zero_bubble' if zero_bubble else virtual} they go through {stages} ranks in "
                f"{passes // stages} equal rounds, and {passes} / {passes // stages} leaves a remainder. "
                f"Use {name} {below * per_pass} or {above * per_pass}, or "
                f"{'schedule: 1f1b' if zero_bubble else 'virtual_pipeline: 1'}."
            )

    def _check_rampup(self, start: int, increment: int, samples: int) -> None:
        rows = self.global_batch_size
        if start > rows or (rows - start) % increment:
            raise ValueError(
                f"rampup_batch_size [{start}, {increment}, {samples}] does not reach global_batch_size ({rows}): "
                f"{rows} - {start} is no multiple of {increment}. Change start or increment."
            )

    def _check_objective(self) -> None:
        model = self.model
        kind = "t5" if model.is_encoder_decoder else "causal" if model.causal else "bert"
        for name, needed in (("fim", "causal"), ("sft", "causal"), ("bert", "bert"), ("t5", "t5")):
            if getattr(self, name) is not None and kind != needed:
                raise ValueError(f"{name} does not go with model.family: {model.family}. Leave {name} out.")
        if kind != "causal" and any(phase.seq_length not in (None, self.seq_length) for phase in self.phases):
            raise ValueError(f"rows of model.family: {model.family} have one length; leave seq_length out of phases.")
        if self.sft is not None:
            self._check_conversations()
        if kind != "causal" and self.sees_documents:
            raise ValueError(
                "reset_position_ids, reset_attention_mask and eod_mask_loss are for causal models; rows of "
                f"model.family: {model.family} hold one document or pair. Leave them out."
            )
        if kind == "bert" and (self.bert_objective.pairs != "none") != model.pair_head:
            raise ValueError(
                f"bert.pairs: {self.bert_objective.pairs} does not go with model.pair_head: "
                f"{str(model.pair_head).lower()}. Set bert.pairs: "
                f"{'nsp or sop' if model.pair_head else 'none'}, or change model.pair_head."
            )
        if kind == "t5" and self.decoder_length < self.span_lengths.decoder:
            raise ValueError(
                f"decoder_seq_length ({self.decoder_length}) is below the {self.span_lengths.decoder} tokens that rows "
                f"of seq_length {self.seq_length} make. Use {self.span_lengths.decoder} or more, or leave it out."
            )
        if kind != "t5" and self.decoder_seq_length is not None:
            raise ValueError(f"decoder_seq_length is for t5, and model.family is {model.family}. Leave it out.")

    def _check_conversations(self) -> None:
        if self.fim is not None:
            raise ValueError("sft and fim are two kinds of rows. Leave one out.")
        if self.sees_documents:
            raise ValueError(
                "rows of conversations keep them apart already. Leave out reset_position_ids, reset_attention_mask and "
                "eod_mask_loss."
            )
        if any(phase.seq_length not in (None, self.seq_length) for phase in self.phases):
            raise ValueError("rows of conversations are not cut into parts; leave seq_length out of phases.")
        if self.subset_losses:
            raise ValueError("subset_losses is for rows of plain text; leave it out with sft.")

    @property
    def bert_objective(self) -> BertConfig:
        """Rows of an encoder."""
        return self.bert or BertConfig(pairs="nsp" if self.model.pair_head else "none")

    @property
    def t5_objective(self) -> T5Config:
        """Rows of an encoder and a decoder."""
        return self.t5 or T5Config()

    @property
    def span_lengths(self) -> "SpanLengths":
        """Tokens of the rows of an encoder and a decoder, without padding."""
        from preprocessing.samples.t5_lengths import lengths_for_encoder

        return lengths_for_encoder(self.seq_length, self.t5_objective)

    @property
    def decoder_length(self) -> int:
        """Tokens of a decoder's row behind an encoder, padding included; 0 where there is none."""
        if not self.model.is_encoder_decoder:
            return 0
        return self.decoder_seq_length or -(-self.span_lengths.decoder // 16) * 16

    def recompute_of(self, layer: int) -> Recompute:
        """What backward computes again of a layer."""
        return self.recompute if self.recompute_layers is None or layer in self.recompute_layers else "none"

    @property
    def sees_documents(self) -> bool:
        """Rows must say where their documents begin."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    @property
    def schedule(self) -> Schedule:
        """Learning rate and weight decay by position; they end with the run where nothing else is said."""
        optimizer = self.optimizer
        if optimizer.counts_samples:
            return Schedule(optimizer, optimizer.decay_samples or self.train_samples)
        return Schedule(optimizer, optimizer.decay_steps or self.train_steps)

    @property
    def batch_sizes(self) -> list[int]:
        """Rows of a batch, each size once, in the order of the run."""
        start, increment, _ = self.rampup_batch_size or (self.global_batch_size, 1, 0)
        return list(range(start, self.global_batch_size + 1, increment))

    def batch_rows(self, consumed_samples: int) -> int:
        """Rows of the batch that follows `consumed_samples`."""
        return batch_rows(consumed_samples, self.global_batch_size, self.rampup_batch_size)

    @property
    def num_micro_batches(self) -> int:
        """Forward passes per rank per optimizer step, of full size."""
        return self.global_batch_size // (self.micro_batch_size * self.layout.data_parallel)

    @property
    def curriculum(self) -> Curriculum:
        """Which samples of the index the rows of the run are."""
        return Curriculum(self)

    @property
    def validates(self) -> bool:
        """There is a validation loss."""
        return self.valid_batches > 0 or self.valid_full

    def valid_rows(self, available: int) -> int:
        """Rows of a validation set that a loss is taken over, when there are so many."""
        return available if self.valid_full else min(available, self.valid_batches * self.global_batch_size)

    def is_valid_step(self, step: int) -> bool:
        """A validation loss is due behind a step before the last."""
        return self.valid_interval > 0 and step % self.valid_interval == 0

    @property
    def train_samples(self) -> int:
        """Rows of the whole run."""
        return self.samples_after(self.train_steps)

    def samples_after(self, step: int) -> int:
        """Samples that `step` steps use up."""
        return step_samples(step, self.global_batch_size, self.rampup_batch_size).stop if step else 0


def _interleaves(passes: int, ranks: int) -> bool:
    """Say whether an interleaved schedule takes so many micro-batches: rounds of `ranks` or a few more, all equal."""
    return passes % (passes // ranks) == 0


def with_vocab_size(config: PretrainConfig, vocab_size: int) -> PretrainConfig:
    """Fill in the vocabulary size, checking all arithmetic again.

    Raises:
        pydantic.ValidationError: A degree does not divide the padded vocabulary.
    """
    data = config.model_dump()
    data["model"]["vocab_size"] = config.model.vocab_size or vocab_size
    return PretrainConfig.model_validate(data)
