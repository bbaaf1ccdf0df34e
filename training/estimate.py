"""What a run will need, from its settings alone: parameters, memory per rank, operations, bubble. No torch.

Memory is that of the tensors that training holds at the worst moment of a step, on the rank of the pipeline that
needs most; allocators, communication buffers and the framework itself come on top.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from training.activation_memory import activations_bytes
from training.config import PretrainConfig
from training.flops import active_parameter_count, parameter_count, step_flops_per_token
from training.layout_config import LayoutConfig
from training.optimizer_state import states_of
from training.parameters import stored_parameters
from training.pipeline_split import layers_of_stages, rank_of_stage

GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """Needs of a run. Memory in bytes, on the rank that needs most.

    Args:
        parameters: Of the whole model.
        active_parameters: Those that a token meets; fewer with experts.
        parameters_per_rank: Of the largest stage, on one tensor-parallel rank.
        weights_bytes: Masters, and the copy that the layers compute with.
        gradients_bytes: In the masters' precision, at the worst moment.
        optimizer_bytes: Moments, or momentum, and the moving average of the weights.
        activations_bytes: Kept for backward, of all micro-batches in flight, with a block's own backward and the loss.
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
            "  weights": f"{_size(self.weights_bytes)} (masters, and the copy that the layers read)",
            "  gradients": f"{_size(self.gradients_bytes)} (at the worst moment)",
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
    flops = step_flops_per_token(model, config.seq_length, config.decoder_length or None)
    tokens = config.train_samples * config.seq_length
    parameters, states = parameter_count(model), _optimizer_numbers(config)
    held = _parameters_by_rank(config)
    needs = [_memory(config, here, rank, states / parameters) for rank, here in enumerate(held)]
    weights, gradients, optimizer, activations = max(needs, key=sum)
    return Estimate(
        parameters=parameters,
        active_parameters=active_parameter_count(model),
        parameters_per_rank=max(here.whole for here in held),
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        flops_per_token=flops,
        total_flops=flops * tokens,
        tokens=tokens,
        bubble=_bubble(layout, config.num_micro_batches),
        checkpoint_bytes=(parameters + states) * _master_bytes(config),
        num_ranks=layout.world_size,
        num_micro_batches=config.num_micro_batches,
    )


def _master_bytes(config: PretrainConfig) -> int:
    return 8 if config.precision == "float64" else 4


@dataclass
class _Held:
    """Parameters of a rank of the pipeline, on one tensor-parallel rank.

    Args:
        whole: Those that it computes with.
        part: Those that it keeps, with its moments.
        block: Of its largest layer, of `whole`.
        blocks: Of all its layers, of `whole`.
    """

    whole: int = 0
    part: float = 0.0
    block: int = 0
    blocks: int = 0


def _memory(config: PretrainConfig, here: _Held, rank: int, states_per_parameter: float) -> tuple[int, int, int, int]:
    """Bytes of weights, gradients, optimizer state and activations on a rank of the pipeline."""
    layout, master = config.layout, _master_bytes(config)
    compute = 2 if config.precision in ("bf16", "fp16") else master
    # With shard: parameters two blocks at a time are whole, and what is no block during the whole pass.
    gathered = here.whole - here.blocks + 2 * here.block if layout.shard == "parameters" else here.whole
    activations = activations_bytes(config, rank, compute)
    # Gradients add up whole over the micro-batches, or in parts where each of them is summed over the ranks at once. Of
    # a single micro-batch they come as the activations go, and only what is more than those counts.
    is_whole = layout.shard in ("none", "optimizer") and config.num_micro_batches > 1
    gradients = round((max(here.whole if is_whole else 0.0, here.part) + here.block) * master)
    if config.num_micro_batches == 1:
        gradients = max(gradients - activations, here.block * master)
    return (
        round(here.part * master) + gathered * compute,
        gradients,
        round(here.part * states_per_parameter * master),
        activations,
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


def _parameters_by_rank(config: PretrainConfig) -> list[_Held]:
    model, layout = config.model, config.layout
    tp, last = layout.tensor_parallel, rank_of_stage(layout, layout.num_stages - 1)
    stages = enumerate(layers_of_stages(model, layout))
    owner = {layer: rank_of_stage(layout, stage) for stage, layers in stages for layer in layers}
    held = [_Held() for _ in range(layout.pipeline_parallel)]
    sizes: dict[int, int] = {}
    for name, (shape, tp_dim) in stored_parameters(model).items():
        part = math.prod(shape) // (tp if tp_dim is not None else 1)
        part //= layout.expert_parallel if ".experts." in name else 1
        share = part / (layout.expert_parts if ".experts." in name else layout.shard_parts)
        places = [last]
        if name.startswith("layers."):
            layer = int(name.split(".")[1])
            places = [owner[layer]]
            sizes[layer] = sizes.get(layer, 0) + part
        elif name.startswith("embedding."):
            is_tied = name == "embedding.word.weight" and model.tied_embeddings and layout.num_stages > 1
            places = [0, last] if is_tied else [0]
        for place in places:
            held[place].whole += part
            held[place].part += share
    for layer, size in sizes.items():
        here = held[owner[layer]]
        here.blocks, here.block = here.blocks + size, max(here.block, size)
    return held


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours = seconds / 3600
    return f"{seconds / 60:.0f} min" if hours < 2 else f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
