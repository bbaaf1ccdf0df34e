"""What a run writes down while it trains: lines of metrics, losses of subsets, traces. Every rank has a record."""

import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from training.data import Source
from training.flops import step_flops_per_token
from training.launch import tell
from training.measure import matmul_peak_flops, peak_memory_bytes
from training.metrics import METRICS, MetricsWriter
from training.model import compute_dtype
from training.profiling import StepProfiler
from training.subset_losses import SubsetLosses
from training.trainer import StepResult, Trainer


class RunRecord:
    """Watches the steps of a run; rank 0 writes `metrics.jsonl`."""

    def __init__(self, trainer: Trainer, source: Source, output: Path) -> None:
        config, device = trainer.config, trainer.mesh.device
        self.trainer = trainer
        peak = matmul_peak_flops(device, compute_dtype(config.precision))
        self.lines = _Lines(trainer, output, peak) if dist.get_rank() == 0 else None
        self.profiler = StepProfiler(config.profile_steps, output / "logs", trainer.mesh)
        self.subsets = SubsetLosses(trainer, source) if config.subset_losses else None
        self._is_logged = False
        self._started = self._training_s = 0.0
        self._more: dict[str, float] = {}

    def begin_step(self) -> None:
        """Prepare for the step that follows."""
        config, step = self.trainer.config, self.trainer.step + 1
        self._is_logged = step == config.train_steps or step % config.log_interval == 0
        if self.subsets is not None and self._is_logged:
            self.subsets.begin()
        self.profiler.before_step()
        self._started = time.perf_counter()

    def end_step(self, step: StepResult) -> None:
        """Take what can only be seen right behind a step; every rank calls it."""
        self._training_s += time.perf_counter() - self._started
        if (trace := self.profiler.after_step()) is not None:
            tell(f"wrote {trace}")
        self._more = {}
        if self.subsets is not None and self._is_logged:
            self._more = self.subsets.end(step.consumed_samples - step.batch_samples, step.batch_samples)

    def write(self, step: StepResult, valid_losses: Mapping[str, float], *, failed_saves: int = 0) -> None:
        """Write the step's line where one is due; a step without update always has one.

        Args:
            step: What it did.
            valid_losses: Those measured after it, by their names in the line.
            failed_saves: Checkpoints given up since the run's start.
        """
        if self.lines is None:
            return
        if step.outcome != "updated":
            tell(f"step {step.step} made no update: {step.reason}")
        if self._is_logged or valid_losses or step.outcome != "updated":
            failed = {"failed_saves": failed_saves} if failed_saves else {}
            self.lines.write(step, self._training_s, {**self._more, **valid_losses, **failed})

    def close(self) -> float | None:
        """End the record; returns the rate of the last line in tokens per second, on rank 0."""
        self.profiler.close()
        if self.lines is None:
            return None
        self.lines.close()
        return self.lines.tokens_per_s


class _Lines:
    """The lines of `metrics.jsonl`."""

    def __init__(self, trainer: Trainer, output: Path, peak: float) -> None:
        self.trainer = trainer
        self.peak = peak
        self.curriculum = trainer.curriculum
        self.writer = MetricsWriter(output / METRICS, after_step=trainer.step)
        self.since_s, self.since_samples = 0.0, trainer.consumed_samples
        self.tokens_per_s: float | None = None

    def write(self, step: StepResult, training_s: float, extra: dict[str, float]) -> None:
        """Write a line; rates are means since the line before, without the time of saving and validating."""
        tokens = self.curriculum.tokens_after(step.consumed_samples)
        rate = (tokens - self.curriculum.tokens_after(self.since_samples)) / (training_s - self.since_s)
        self.since_s, self.since_samples, self.tokens_per_s = training_s, step.consumed_samples, rate
        config = self.trainer.config
        length = self.curriculum.phase_at(step.consumed_samples - 1).seq_length
        flops = rate * step_flops_per_token(config.model, length, config.decoder_length or None)
        self.writer.write(
            step.step,
            **_finite(loss_nats=step.loss_nats, gradient_norm=step.gradient_norm),
            learning_rate=step.learning_rate,
            tokens=tokens,
            tokens_per_s=rate,
            model_flops_per_s=flops,
            matmul_peak_share=flops / (self.peak * self.trainer.config.layout.world_size),
            data_wait_s=step.data_wait_s,
            compute_s=step.compute_s,
            reduce_s=step.reduce_s,
            update_s=step.update_s,
            memory_bytes=peak_memory_bytes(self.trainer.mesh.device),
            **extra,
            **self._when_it_matters(step),
        )

    def _when_it_matters(self, step: StepResult) -> dict[str, float | str]:
        """Fields that only some lines have."""
        trainer, more = self.trainer, dict[str, float | str]()
        if len(self.curriculum.phases) > 1:
            more["seq_length"] = self.curriculum.phase_at(step.consumed_samples - 1).seq_length
        if trainer.config.rampup_batch_size is not None:
            more["batch_samples"] = step.batch_samples
        if trainer.config.model.moe is not None:
            more["auxiliary_loss_nats"] = step.auxiliary_loss_nats
        if trainer.config.model.pair_head:
            more["pair_loss_nats"] = step.auxiliary_loss_nats
        if step.loss_scale is not None:
            more["loss_scale"] = step.loss_scale
        if trainer.skipped_steps:
            more |= {"skipped_steps": trainer.skipped_steps, "roll_backs": trainer.roll_backs}
        if step.outcome != "updated":
            more |= {"event": step.outcome, "reason": step.reason}
        return more

    def close(self) -> None:
        self.writer.close()


def _finite(**numbers: float) -> dict[str, float]:
    """Leave out what JSON has no number for; the line's `reason` says it."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
