"""What changes along a run as a function of its position alone: learning rate, weight decay, rows of a batch.

Nothing is remembered from step to step, so a resumed run has the values of the uninterrupted one. Never
imports torch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from training.optimizer_config import DecayShape, OptimizerConfig

RampUp = tuple[int, int, int]


@dataclass(frozen=True)
class Schedule:
    """Learning rate and weight decay of each update.

    Args:
        optimizer: Its settings.
        decay_end: Position at which `min_lr` is reached.
    """

    optimizer: OptimizerConfig
    decay_end: int

    @property
    def warmup(self) -> int:
        config = self.optimizer
        return (config.warmup_samples or 0) if config.counts_samples else config.warmup_steps

    def position(self, step: int, consumed_samples: int) -> int:
        """Position of an update: its number (from 1), or the samples used up to and with its batch."""
        return consumed_samples if self.optimizer.counts_samples else step

    def learning_rate(self, position: int) -> float:
        """Return the learning rate: linear warm-up to lr, then as `schedule` says, never under min_lr."""
        config, warmup, end = self.optimizer, self.warmup, self.decay_end
        if position <= warmup:
            return config.lr * position / warmup
        if config.schedule == "constant":
            return config.lr
        if config.schedule == "inverse_sqrt":  # Vaswani et al. 2017, arXiv:1706.03762, equation 3
            return max(config.min_lr, config.lr * math.sqrt(max(1, warmup) / position))
        if position >= end:
            return config.min_lr
        start = warmup if config.schedule != "wsd" else max(warmup, end - self._wsd_decay)
        if position <= start:
            return config.lr
        shape: DecayShape = config.wsd_decay if config.schedule == "wsd" else _SHAPES[config.schedule]
        progress = (position - start) / (end - start)
        if shape == "exponential":
            return config.lr * math.exp(progress * math.log(config.min_lr / config.lr))
        return config.min_lr + (config.lr - config.min_lr) * _REMAINING[shape](progress)

    def weight_decay(self, position: int) -> float:
        """Return the weight decay, on the way from `weight_decay` to `end_weight_decay`."""
        first, last = self.optimizer.weight_decay, self.optimizer.end_weight_decay
        if last is None:
            return first
        return first + (last - first) * min(1.0, position / self.decay_end)

    @property
    def _wsd_decay(self) -> int:
        return self.optimizer.wsd_decay_samples or self.optimizer.wsd_decay_steps or 0


_SHAPES: dict[str, DecayShape] = {"cosine": "cosine", "linear": "linear"}
# Share of (lr - min_lr) that is left at a progress from 0 to 1. 1 - sqrt: Hägele et al. 2024, arXiv:2405.18392.
_REMAINING: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def batch_rows(consumed_samples: int, global_batch_size: int, rampup: RampUp | None) -> int:
    """Rows of the batch that follows `consumed_samples`, as Megatron-LM's `--rampup-batch-size` counts them.

    Args:
        rampup: (start, increment, samples): the batch grows from `start` by `increment` in equal shares of `samples`.
    """
    if rampup is None:
        return global_batch_size
    start, increment, samples = rampup
    increments = (global_batch_size - start) // increment
    if increments == 0 or consumed_samples >= samples:
        return global_batch_size
    return min(global_batch_size, start + consumed_samples * increments // samples * increment)


def batches(global_batch_size: int, rampup: RampUp | None) -> Iterator[tuple[int, int]]:
    """Yield (first sample, rows) of each step, up to and with the first of full size."""
    consumed = 0
    while True:
        rows = batch_rows(consumed, global_batch_size, rampup)
        yield consumed, rows
        if rows == global_batch_size:
            return
        consumed += rows


def step_samples(step: int, global_batch_size: int, rampup: RampUp | None) -> range:
    """Numbers of the samples of update `step` (from 1) of a run that lost no step."""
    number, consumed = 0, 0
    for number, (consumed, rows) in enumerate(batches(global_batch_size, rampup), 1):
        if number == step:
            return range(consumed, consumed + rows)
    first = consumed + (step - number) * global_batch_size
    return range(first, first + global_batch_size)
