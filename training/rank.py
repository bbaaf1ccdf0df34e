"""One rank of a training run: `python -m training.rank JOB.json`, started by torchrun.

In: a job file that the stage wrote. Out, from rank 0: `metrics.jsonl`, step folders and
`logs/result.json`. The heavy imports come after the log is open, so that their errors are kept too.
"""

import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from contracts.json_text import parse_json
from training.config import PretrainConfig
from training.device import choose_device, ranks_here
from training.flops import step_flops_per_token
from training.launch import STOP_SIGNALS, rank_main, tell
from training.metrics import METRICS, MetricsWriter
from training.watching import Beat

if TYPE_CHECKING:
    from training.data import SampleSource
    from training.trainer import StepResult, Trainer


@dataclass(frozen=True)
class Job:
    """What a rank is told.

    Args:
        config: The settings, vocabulary size included, as plain data.
        output: Folder of the artifact.
        index: Folder of the index artifact.
        resume_from: Step folder to go on from; None starts from the seed.
        stop_file: When it appears, the run saves and ends.
        has_validation: The index has validation samples.
    """

    config: dict[str, Any]
    output: str
    index: str
    resume_from: str | None
    stop_file: str
    has_validation: bool

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Job":
        return cls(**parse_json(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Result:
    """How a run ended on this start; rank 0 leaves it in `logs/result.json`."""

    step: int
    loss_nats: float | None
    valid_loss_nats: float | None
    tokens_per_s: float | None


class _StopRequest:
    """Whether this rank was asked to save and end: by SIGTERM or SIGUSR1, or (rank 0 looks) by the stop file."""

    def __init__(self, stop_file: Path, *, looks: bool) -> None:
        self._file = stop_file
        self._looks = looks
        self._signalled = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True

    def __call__(self) -> bool:
        return self._signalled or (self._looks and self._file.exists())


def main(arguments: list[str]) -> None:
    """Train as the job file says."""
    train(Job.read(Path(arguments[0])), _open_samples)


def _open_samples(job: Job, split: str) -> "SampleSource":
    from preprocessing.samples.opening import open_causal_samples

    source: SampleSource = open_causal_samples(Path(job.index), split)
    return source


def train(job: Job, open_samples: Callable[[Job, str], "SampleSource"]) -> None:
    """Join the other ranks, train until the last step or a request to stop, and leave a checkpoint.

    Args:
        open_samples: Opens the samples of a split ("train", "valid") of the job's index.
    """
    config = PretrainConfig.model_validate(job.config)
    import torch.distributed as dist

    from training.checkpoint import load_checkpoint
    from training.mesh import build_mesh, init_ranks
    from training.trainer import Trainer, full_precision_matmul

    device, note = choose_device(config.device, ranks_here(config.layout.world_size))
    init_ranks(device, timeout_s=config.timeout_s)
    mesh = build_mesh(config.layout, device)
    if note is not None and dist.get_rank() == 0:
        tell(note)
    full_precision_matmul(mesh.device)
    trainer = Trainer(config, mesh)
    if job.resume_from is not None:
        load_checkpoint(trainer, Path(job.resume_from))
    train_source = open_samples(job, "train")
    valid_source = open_samples(job, "valid") if job.has_validation else None
    result = run(trainer, job, train_source, valid_source)
    if dist.get_rank() == 0:
        (Path(job.output) / "logs" / "result.json").write_text(json.dumps(asdict(result)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run(trainer: "Trainer", job: Job, train_source: "SampleSource", valid_source: "SampleSource | None") -> Result:
    """Train to the end or to a request to stop, saving on the way; every rank calls it."""
    import torch.distributed as dist

    from training.checkpoint import roll_back, save_checkpoint
    from training.measure import matmul_peak_flops
    from training.model import compute_dtype
    from training.profiling import StepProfiler
    from training.subset_losses import SubsetLosses
    from training.validation import validation_loss

    config, output = trainer.config, Path(job.output)
    peak = matmul_peak_flops(trainer.mesh.device, compute_dtype(config.precision))
    recorder = _Recorder(trainer, output, peak) if dist.get_rank() == 0 else None
    profiler = StepProfiler(config.profile_steps, output / "logs", trainer.mesh)
    subsets = SubsetLosses(trainer, train_source) if config.subset_losses else None
    beat = Beat()
    request = _StopRequest(Path(job.stop_file), looks=dist.get_rank() == 0)
    step: StepResult | None = None
    valid_loss: float | None = None
    training_s = 0.0
    if config.stability.rolls_back and trainer.step == 0:
        save_checkpoint(trainer, output, keep_last=config.keep_last)  # what the first steps can go back to
    while trainer.step < config.train_steps:
        beat(f"training step {trainer.step + 1}")
        is_logged = trainer.step + 1 == config.train_steps or (trainer.step + 1) % config.log_interval == 0
        if subsets is not None and is_logged:
            subsets.begin()
        profiler.before_step()
        started = time.perf_counter()
        step = trainer.train_step(train_source, wants_to_stop=request())
        training_s += time.perf_counter() - started
        if step.outcome == "roll_back":
            step = replace(step, reason=f"{step.reason}; the weights are those of {roll_back(trainer, output)} again")
        if step.outcome != "updated" and recorder is not None:
            tell(f"step {step.step} made no update: {step.reason}")
        if (trace := profiler.after_step()) is not None:
            tell(f"wrote {trace}")
        more = dict[str, float]()
        if subsets is not None and is_logged:
            more = subsets.end(step.consumed_samples - step.batch_samples, step.batch_samples)
        is_end = trainer.step == config.train_steps
        if is_end and valid_source is not None:
            beat("validating")
            valid_loss = validation_loss(trainer, valid_source)
            more["valid_loss_nats"] = valid_loss
        if recorder is not None and (is_logged or step.outcome != "updated"):
            recorder.record(step, training_s, more)
        # After the record: a step that is saved is never done again, so its line must be there.
        if is_end or step.stop_requested or trainer.step % config.checkpoint_interval == 0:
            beat(f"saving step {trainer.step}")
            save_checkpoint(trainer, output, keep_last=config.keep_last)
        if step.stop_requested:
            if dist.get_rank() == 0:
                tell(f"saved step {trainer.step} of {config.train_steps}")
            break
    profiler.close()
    speed = recorder.tokens_per_s if recorder is not None else None
    if recorder is not None:
        recorder.close()
    return Result(trainer.step, step.loss_nats if step else None, valid_loss, speed)


class _Recorder:
    """Writes the metrics of rank 0."""

    def __init__(self, trainer: "Trainer", output: Path, peak: float) -> None:
        config = trainer.config
        self.trainer = trainer
        self.peak = peak
        self.seq_length = config.seq_length
        self.flops_per_token = step_flops_per_token(config.model, config.seq_length)
        self.writer = MetricsWriter(output / METRICS, after_step=trainer.step)
        self.since_s, self.since_samples = 0.0, trainer.consumed_samples
        self.tokens_per_s: float | None = None

    def record(self, step: "StepResult", training_s: float, extra: dict[str, float]) -> None:
        """Write a line; rates are means since the line before, without the time of saving and validating."""
        from training.measure import peak_memory_bytes

        tokens = (step.consumed_samples - self.since_samples) * self.seq_length
        rate = tokens / (training_s - self.since_s)
        self.since_s, self.since_samples, self.tokens_per_s = training_s, step.consumed_samples, rate
        flops = rate * self.flops_per_token
        self.writer.write(
            step.step,
            **_finite(loss_nats=step.loss_nats, gradient_norm=step.gradient_norm),
            learning_rate=step.learning_rate,
            tokens=step.consumed_samples * self.seq_length,
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

    def _when_it_matters(self, step: "StepResult") -> dict[str, float | str]:
        """Fields that only some lines have."""
        trainer, more = self.trainer, dict[str, float | str]()
        if trainer.config.rampup_batch_size is not None:
            more["batch_samples"] = step.batch_samples
        if trainer.config.model.moe is not None:
            more["auxiliary_loss_nats"] = step.auxiliary_loss_nats
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


if __name__ == "__main__":
    rank_main(main)
