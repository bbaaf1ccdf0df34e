"""What a run will need, from its settings alone: parameters, memory per rank, operations, bubble. No torch.

Memory is an estimate of tensors that training holds on purpose; allocators, communication buffers
and the framework itself come on top.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from training.config import PretrainConfig
from training.flops import active_parameter_count, parameter_count, step_flops_per_token
from training.layout_config import LayoutConfig
from training.optimizer_state import states_of
from training.parameters import stored_parameters
from training.pipeline_split import layers_of_stages, rank_of_stage, stages_of_rank

GIB = 2**30
# Bytes per token and hidden unit that a block keeps for backward at 16 bits without its attention scores,
# which fused attention never holds (Korthikanti et al. 2022, arXiv:2205.05198, equation 1).
_KEPT_PER_BLOCK = 34
_KEPT_SELECTIVE = 20


@dataclass(frozen=True)
class Estimate:
    """Needs of a run. Memory in bytes, on the rank that needs most.

    Args:
        parameters: Of the whole model.
        active_parameters: Those that a token meets; fewer with experts.
        parameters_per_rank: Of the largest stage, on one tensor-parallel rank.
        weights_bytes: Masters, and the copy that the layers compute with.
        gradients_bytes: In the masters' precision.
        optimizer_bytes: Moments, or momentum, and the moving average of the weights.
        activations_bytes: Kept for backward, of all micro-batches in flight.
        flops_per_token: Forward and backward.
        total_flops: Of the run.
        tokens: Of the run.
        bubble: Share of a step in which a pipeline stage waits.
        checkpoint_bytes: One checkpoint on disk, with the optimizer.
    """

    parameters: int
    active_parameters: int
    parameters_per_rank: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    flops_per_token: int
    total_flops: int
    tokens: int
    bubble: float
    checkpoint_bytes: int
    num_ranks: int
    num_micro_batches: int

    @property
    def memory_per_rank_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "memory_per_rank_bytes": self.memory_per_rank_bytes}

    def as_lines(self) -> dict[str, str]:
        """Name each number for a person."""
        lines = {
            "parameters": f"{self.parameters:,}",
            **(
                {"  that a token meets": f"{self.active_parameters:,}"}
                if self.active_parameters < self.parameters
                else {}
            ),
            "parameters on a rank": f"{self.parameters_per_rank:,}",
            "ranks": str(self.num_ranks),
            "tokens of the run": f"{self.tokens:,}",
            "memory per rank": _size(self.memory_per_rank_bytes),
            "  weights": _size(self.weights_bytes),
            "  gradients": _size(self.gradients_bytes),
            "  optimizer": _size(self.optimizer_bytes),
            "  activations": _size(self.activations_bytes),
            "operations per token": f"{self.flops_per_token:.3g} FLOP",
            "operations of the run": f"{self.total_flops:.3g} FLOP",
            "micro-batches per step": str(self.num_micro_batches),
            "pipeline bubble": f"{100 * self.bubble:.1f} %",
            "one checkpoint": _size(self.checkpoint_bytes),
        }
        for speed, name in ((1e11, "100 GFLOP/s (two CPU cores)"), (4e14, "400 TFLOP/s (a Hopper GPU at 40 %)")):
            lines[f"time at {name} a rank"] = _duration(self.seconds(speed))
        return lines

    def seconds(self, flops_per_s: float) -> float:
        """Time of the run when each rank does `flops_per_s`, the pipeline's waiting included."""
        return self.total_flops / (flops_per_s * self.num_ranks) / (1.0 - self.bubble)


def estimate(config: PretrainConfig) -> Estimate:
    """Estimate the needs of a run; `config.model.vocab_size` must be set.

    Raises:
        ValueError: It is not.
    """
    model, layout = config.model, config.layout
    here, kept = _parameters_per_rank(config)
    master = 8 if config.precision == "float64" else 4
    compute = 2 if config.precision in ("bf16", "fp16") else master
    # Parameters are gathered for a pass; with shard: parameters only about a block at a time is.
    gathered = here // max(1, model.total_layers // layout.pipeline_parallel) if layout.shard == "parameters" else here
    accumulated = 0 if layout.shard in ("gradients", "parameters") else here
    flops = step_flops_per_token(model, config.seq_length, config.decoder_length or None)
    tokens = config.train_samples * config.seq_length
    passes = config.num_micro_batches
    parameters, states = parameter_count(model), _optimizer_numbers(config)
    return Estimate(
        parameters=parameters,
        active_parameters=active_parameter_count(model),
        parameters_per_rank=here,
        weights_bytes=kept * master + gathered * compute,
        gradients_bytes=accumulated * master + kept * master,
        optimizer_bytes=kept * states // parameters * master,
        activations_bytes=_activations(config, compute),
        flops_per_token=flops,
        total_flops=flops * tokens,
        tokens=tokens,
        bubble=_bubble(layout, passes),
        checkpoint_bytes=(parameters + states) * master,
        num_ranks=layout.world_size,
        num_micro_batches=passes,
    )


def _bubble(layout: LayoutConfig, passes: int) -> float:
    """Share of a step in which a rank of the pipeline waits, when a forward pass takes as long as either half backward.

    Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Qi et al. 2023, arXiv:2401.10241, table 2. In units of a
    third of a stage's work on a micro-batch; that of `zbv` with few micro-batches is torch's order, played through.
    """
    ranks, stages = layout.pipeline_parallel, layout.stages_per_rank
    waiting = (ranks - 1) * (3 if layout.schedule == "1f1b" else 1)
    if layout.schedule == "zbv":
        waiting = max(ranks - 1, 2 * (ranks - 1) - 2 * (passes - ranks))
    return waiting / (3 * stages * passes + waiting)


def _optimizer_numbers(config: PretrainConfig) -> int:
    """Numbers that the optimizer keeps for the whole model."""
    kind, has_ema = config.optimizer.kind, config.optimizer.ema_decay is not None
    return sum(
        math.prod(shape) * len(states_of(name, shape, kind, has_ema=has_ema))
        for name, (shape, _) in stored_parameters(config.model).items()
    )


def _parameters_per_rank(config: PretrainConfig) -> tuple[int, int]:
    """Parameters of the stages that hold most, on one tensor-parallel rank: those it computes with, those it keeps."""
    model, layout = config.model, config.layout
    ranks, tp = layout.pipeline_parallel, layout.tensor_parallel
    stages = enumerate(layers_of_stages(model, layout))
    owner = {layer: rank_of_stage(layout, stage) for stage, layers in stages for layer in layers}
    held, kept = [0] * ranks, [0.0] * ranks
    for name, (shape, tp_dim) in stored_parameters(model).items():
        part = math.prod(shape) // (tp if tp_dim is not None else 1)
        part //= layout.expert_parallel if ".experts." in name else 1
        share = part / (layout.expert_parts if ".experts." in name else layout.shard_parts)
        places = [ranks - 1]
        if name.startswith("layers."):
            places = [owner[int(name.split(".")[1])]]
        elif name.startswith("embedding."):
            is_tied = name == "embedding.word.weight" and model.tied_embeddings and ranks > 1
            places = [0, ranks - 1] if is_tied else [0]
        for place in places:
            held[place] += part
            kept[place] += share
    return max(held), round(max(kept))


def _activations(config: PretrainConfig, bytes_per_number: int) -> int:
    model, layout = config.model, config.layout
    tp = layout.tensor_parallel
    tokens = config.seq_length // layout.context_parallel * config.micro_batch_size
    unit = tokens * model.hidden_size * bytes_per_number // 2
    if config.recompute == "full":
        per_layer, once = 2 * unit // (tp if layout.sequence_parallel else 1), _KEPT_PER_BLOCK * unit // tp
    else:
        kept = _KEPT_PER_BLOCK if config.recompute == "none" else _KEPT_SELECTIVE
        # Without sequence parallelism the norms, dropouts and residuals (10 of the 34) are not cut.
        per_layer = kept * unit // tp if layout.sequence_parallel else (10 + (kept - 10) // tp) * unit
        once = 0
    return max(_layers_in_flight(config, rank) for rank in range(layout.pipeline_parallel)) * per_layer + once


def _layers_in_flight(config: PretrainConfig, rank: int) -> int:
    """Layers whose activations a rank of the pipeline keeps at once, once for each micro-batch."""
    layout, passes = config.layout, config.num_micro_batches
    ranks, stages = layout.pipeline_parallel, stages_of_rank(layout, rank)
    layers = [len(layers_of_stages(config.model, layout)[stage]) for stage in stages]
    if layout.schedule != "1f1b":
        # As many micro-batches as there are ranks, on each stage; the half backward for the weights frees them.
        return sum(layers) * min(ranks, passes)
    if len(layers) == 1:
        return layers[0] * min(ranks - rank, passes)
    # Narayanan et al. 2021, section 2.2: warm-up passes, and the one that comes before the first backward.
    per_round = passes // (passes // ranks)
    begun = min(2 * (ranks - 1 - rank) + (len(layers) - 1) * per_round + 1, len(layers) * passes)
    turns = ((n // per_round) % len(layers) for n in range(begun))
    return sum(layers[turn] for turn in turns)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours = seconds / 3600
    return f"{seconds / 60:.0f} min" if hours < 2 else f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
