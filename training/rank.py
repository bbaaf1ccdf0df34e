"""One rank of a training run: `python -m training.rank JOB.json`, started by torchrun.

In: a job file that the stage wrote. Out, from rank 0: `metrics.jsonl`, step folders and
`logs/result.json`. The heavy imports come after the log is open, so that their errors are kept too.
"""

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from contracts.json_text import parse_json
from training.config import PretrainConfig
from training.device import choose_device, ranks_here
from training.launch import STOP_SIGNALS, rank_main, tell
from training.watching import Beat

if TYPE_CHECKING:
    from training.data import Source
    from training.trainer import StepResult, Trainer


@dataclass(frozen=True)
class Job:
    """What a rank is told.

    Args:
        config: The settings, vocabulary size included, as plain data.
        output: Folder of the artifact.
        index: Folder of the index artifact.
        resume_from: Step folder to go on from; None starts from the seed.
        initial: Step folder to begin with, as the settings' `initial` says; None begins with random weights.
        stop_file: When it appears, the run saves and ends.
        validation: Name to index and split of every validation set; the run's own has the name "".
    """

    config: dict[str, Any]
    output: str
    index: str
    resume_from: str | None
    initial: str | None
    stop_file: str
    validation: dict[str, tuple[str, str]]

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


def _open_samples(job: Job, index: str, split: str) -> "tuple[Source, int]":
    from training.rows import open_rows

    return open_rows(PretrainConfig.model_validate(job.config), Path(index), split)


def train(job: Job, open_samples: Callable[[Job, str, str], "tuple[Source, int]"]) -> None:
    """Join the other ranks, train until the last step or a request to stop, and leave a checkpoint.

    Args:
        open_samples: Opens the samples of a split ("train", "valid") of an index; returns them and their number.
    """
    config = PretrainConfig.model_validate(job.config)
    import torch.distributed as dist

    from training.checkpoint import load_checkpoint, load_initial
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
    elif job.initial is not None:
        load_initial(trainer, Path(job.initial), config.initial)
    train_source, _ = open_samples(job, job.index, "train")
    valid_sources = {name: open_samples(job, *where) for name, where in job.validation.items()}
    result = run(trainer, job, train_source, valid_sources)
    if dist.get_rank() == 0:
        (Path(job.output) / "logs" / "result.json").write_text(json.dumps(asdict(result)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run(
    trainer: "Trainer", job: Job, train_source: "Source", valid_sources: "Mapping[str, tuple[Source, int]]"
) -> Result:
    """Train to the end or to a request to stop, saving on the way; every rank calls it."""
    import torch.distributed as dist

    from training.checkpoint import roll_back
    from training.recording import RunRecord
    from training.saver import Saver
    from training.trainer import AgreedStopError
    from training.validation import validation_losses

    config, output = trainer.config, Path(job.output)
    record = RunRecord(trainer, train_source, output)
    saver = Saver(trainer, output)
    beat = Beat()
    request = _StopRequest(Path(job.stop_file), looks=dist.get_rank() == 0)
    step: StepResult | None = None
    valid_losses: dict[str, float] = {}
    valid_rows = {name: (source, config.valid_rows(size)) for name, (source, size) in valid_sources.items()}
    if config.stability.rolls_back and trainer.step == 0:
        saver.save()  # what the first steps can go back to
    while trainer.step < config.train_steps:
        beat(f"training step {trainer.step + 1}")
        record.begin_step()
        try:
            step = trainer.train_step(train_source, wants_to_stop=request())
        except AgreedStopError:
            saver.wait()
            raise
        record.end_step(step)
        saver.look()
        if step.outcome == "roll_back":
            saver.wait()
            step = replace(step, reason=f"{step.reason}; the weights are those of {roll_back(trainer, output)} again")
        is_end = trainer.step == config.train_steps
        valid_losses = {}
        if valid_rows and (is_end or config.is_valid_step(trainer.step)):
            beat("validating")
            valid_losses = validation_losses(trainer, valid_rows)
        record.write(step, valid_losses, failed_saves=saver.failed_saves)
        # After the record: a step that is saved is never done again, so its line must be there.
        if is_end or step.stop_requested or trainer.step % config.checkpoint_interval == 0:
            beat(f"saving step {trainer.step}")
            saver.save(is_required=is_end or step.stop_requested)
        if step.stop_requested:
            if dist.get_rank() == 0:
                tell(f"saved step {trainer.step} of {config.train_steps}")
            break
    valid_loss = valid_losses.get("valid_loss_nats")
    return Result(trainer.step, step.loss_nats if step else None, valid_loss, record.close())


if __name__ == "__main__":
    rank_main(main)
