"""One rank's part of a training run: model, optimizer and position, and one optimizer step of it."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from contracts.errors import ShardlineError
from training.config import PretrainConfig
from training.data import Batch, Source, count_loss_tokens, read_batch, step_sample_ids, weigh_pairs
from training.experts import AuxiliaryLosses
from training.gradients import GradientFinisher, clip, local_parameters, non_finite
from training.initialization import initialize
from training.mesh import Mesh
from training.model import TransformerStage, compute_dtype, master_dtype
from training.optimizer import LocalOptimizer
from training.pipeline import Engine, make_engine
from training.pipeline_split import stages_of_rank
from training.sharding import shard_stage
from training.stability import Guard, LossScaler, Verdict

Outcome = Literal["updated", "skipped", "roll_back"]


class AgreedStopError(ShardlineError):
    """The numbers of a step end the run; every rank raises it at the same step."""


@dataclass(frozen=True)
class StepResult:
    """Numbers of one optimizer step, equal on every rank but for its times.

    Args:
        step: Number of the step, from 1.
        loss_nats: Mean over the tokens of the global batch that count, before the update.
        gradient_norm: Before clipping.
        learning_rate: Used by the update.
        data_wait_s: Time this rank spent reading its rows.
        stop_requested: Some rank was asked to save and end.
        outcome: Whether there was an update; roll_back asks the caller to load the last checkpoint.
        reason: Why there was none.
        consumed_samples: Samples used so far, this step's included.
        batch_samples: Samples of this step.
        loss_scale: Of fp16; None elsewhere.
        auxiliary_loss_nats: What experts add to the objective: weighted losses of balance and router.
        compute_s: Time of forward and backward.
        reduce_s: Time of the sums over ranks that are left, and of the norm.
        update_s: Time of clipping and optimizer; on a GPU of starting them, since nothing waits for their end.
    """

    step: int
    loss_nats: float
    gradient_norm: float
    learning_rate: float
    data_wait_s: float
    stop_requested: bool = False
    outcome: Outcome = "updated"
    reason: str = ""
    consumed_samples: int = 0
    batch_samples: int = 0
    loss_scale: float | None = None
    auxiliary_loss_nats: float = 0.0
    compute_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0


class Trainer:
    """The state of a run on one rank; `step` and `consumed_samples` are its whole position in the data.

    Attributes:
        step: Steps done; each used up a batch, whether or not it made an update.
        consumed_samples: Samples used up.
        updates: Updates that the weights have seen; fewer than `step` after skips and roll-backs.
        skipped_steps: Steps that made no update.
        roll_backs: Times that the weights of a checkpoint came back.
        before_update: Called before parameters and optimizer state change.
    """

    def __init__(self, config: PretrainConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.stages = build_stages(config, mesh)
        self.auxiliary = self.stages[0].auxiliary
        self.parameters = local_parameters(self.stages)
        self.optimizer = LocalOptimizer(self.parameters, config.optimizer, mesh)
        self.engine = make_engine(self.stages, mesh, config)
        self.finisher = GradientFinisher(self.parameters, mesh, shared=self.stages[0].shared)
        self.schedule = config.schedule
        self.curriculum = config.curriculum
        self.guard = Guard(config.stability)
        self.scaler = LossScaler(config.loss_scale) if config.precision == "fp16" else None
        self.step = 0
        self.consumed_samples = 0
        self.updates = 0
        self.skipped_steps = 0
        self.roll_backs = 0
        self.before_update: Callable[[], object] | None = None
        self._engines: dict[tuple[int, int], Engine] = {}

    def train_step(self, source: Source, *, wants_to_stop: bool = False) -> StepResult:
        """Take the next global batch from `source` and update the parameters.

        Raises:
            AgreedStopError: The loss or the gradient is not finite, or spikes, and the policy is to stop;
                nothing was updated.
        """
        started = time.perf_counter()
        rows = self.config.batch_rows(self.consumed_samples)
        batch = self._read(source, rows)
        data_wait_s = time.perf_counter() - started
        clock = _Clock(self.mesh.device)
        scale = self.scaler.scale if self.scaler is not None else 1.0
        num_tokens = count_loss_tokens(batch, self.mesh)
        batch = weigh_pairs(batch, num_tokens, rows)
        scaled_tokens = num_tokens if scale == 1.0 else num_tokens / scale
        loss_share = self._engine(rows).run(batch, num_tokens=scaled_tokens)
        clock.mark()
        gradients = self.finisher.finish()
        norm, loss_sum, auxiliary_sum, stops = self.finisher.agree(
            gradients, loss_share, auxiliary_sum=self.auxiliary.take(), wants_to_stop=wants_to_stop
        )
        norm, loss_nats = norm / scale, loss_sum / num_tokens
        clock.mark()
        compute_s, reduce_s = clock.seconds()
        updating = time.perf_counter()
        verdict = self._verdict(loss_nats, norm)
        if verdict.action == "stop":
            raise self._stopped(verdict, gradients, loss_share)
        position = self.schedule.position(self.step + 1, self.consumed_samples + rows)
        lr = self.schedule.learning_rate(position)
        if verdict.action == "update":
            clip(gradients, norm, self.config.optimizer.clip_grad, loss_scale=scale)
            if self.before_update is not None:
                self.before_update()
            self.optimizer.step(gradients, lr, self.schedule.weight_decay(position))
            self.updates += 1
        else:
            self.skipped_steps += 1
        self._clear_gradients()
        self.step += 1
        self.consumed_samples += rows
        return StepResult(
            self.step,
            loss_nats,
            norm,
            lr,
            data_wait_s,
            stops,
            outcome={"update": "updated", "skip": "skipped"}.get(verdict.action, "roll_back"),  # type: ignore[arg-type]
            reason=verdict.reason,
            consumed_samples=self.consumed_samples,
            batch_samples=rows,
            loss_scale=None if self.scaler is None else scale,
            auxiliary_loss_nats=auxiliary_sum / num_tokens,
            compute_s=compute_s,
            reduce_s=reduce_s,
            update_s=time.perf_counter() - updating,
        )

    def _read(self, source: Source, rows: int) -> Batch:
        ids = step_sample_ids(self.consumed_samples, rows, dp_rank=self.mesh.rank("dp"), dp_size=self.mesh.size("dp"))
        return read_batch(source, ids, self.mesh.device)

    def _engine(self, rows: int) -> Engine:
        """Return the engine for the next batch, of `rows`: a pipeline has a fixed number and shape of micro-batches."""
        length = self.curriculum.phase_at(self.consumed_samples).seq_length
        is_usual = (rows, length) == (self.config.global_batch_size, self.config.seq_length)
        if is_usual or self.mesh.size("pp") == 1:
            return self.engine
        if (rows, length) not in self._engines:
            changes = {"global_batch_size": rows, "rampup_batch_size": None, "seq_length": length, "phases": ()}
            engine = make_engine(self.stages, self.mesh, self.config.model_copy(update=changes))
            self._engines = {(rows, length): engine}
        return self._engines[rows, length]

    def _verdict(self, loss_nats: float, norm: float) -> Verdict:
        if self.scaler is None:
            return self.guard.judge(loss_nats, norm)
        if math.isfinite(loss_nats) and not math.isfinite(norm) and self.scaler.can_fall:
            self.scaler.on_overflow()
            return Verdict("skip", f"gradients overflowed; the loss scale is now {self.scaler.scale:g}")
        verdict = self.guard.judge(loss_nats, norm)
        if verdict.action == "update":
            self.scaler.on_update()
        return verdict

    def _stopped(self, verdict: Verdict, gradients: list[Tensor], loss_share: Tensor) -> AgreedStopError:
        where = non_finite(self.parameters, gradients, loss_share)
        return AgreedStopError(
            f"Step {self.step + 1}: {verdict.reason}, so no update was made{where}. "
            f"Lower optimizer.lr (now up to {self.config.optimizer.lr:g}), lengthen optimizer.warmup_steps, set "
            "optimizer.clip_grad, or let stability.on_nonfinite or on_spike skip or roll_back. "
            "The last checkpoint stays."
        )

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.sharded.grad = None

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides tensors, step and samples; empty for an undisturbed run."""
        state: dict[str, Any] = {}
        if self.updates != self.step:
            counts = {"skipped_steps": self.skipped_steps, "roll_backs": self.roll_backs}
            state |= {"updates": self.updates, **counts}
        if guard := self.guard.state():
            state["guard"] = guard
        if self.scaler is not None:
            state["loss_scale"] = self.scaler.state()
        return state

    def load_extra_state(self, state: Mapping[str, Any], *, step: int, consumed_samples: int) -> None:
        """Take over a checkpoint's position and what `extra_state` returned."""
        self.step, self.consumed_samples = step, consumed_samples
        self.updates = int(state.get("updates", step))
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.roll_backs = int(state.get("roll_backs", 0))
        self.guard.load(state.get("guard", {}))
        if self.scaler is not None and "loss_scale" in state:
            self.scaler.load(state["loss_scale"])
        self.optimizer.set_step(self.updates)


class _Clock:
    """Times of a step's parts. On a GPU they are those of the device, and nothing waits for them that would not."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = [self._mark()]

    def mark(self) -> None:
        """End a part of the step."""
        self._marks.append(self._mark())

    def seconds(self) -> list[float]:
        """Length of each part so far; the last must have been waited for, as a sum over ranks on the host is."""
        marks = self._marks
        if self._is_cuda:
            marks[-1].synchronize()
            return [a.elapsed_time(b) / 1000.0 for a, b in pairwise(marks)]
        return [b - a for a, b in pairwise(marks)]

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def build_stages(config: PretrainConfig, mesh: Mesh, *, initialized: bool = True) -> list[TransformerStage]:
    """Build, initialize and shard this rank's stages, in the order of their layers.

    Args:
        initialized: Fill the weights from the seed; False leaves them undefined, for a checkpoint to fill.
    """
    auxiliary = AuxiliaryLosses()
    places = stages_of_rank(config.layout, mesh.rank("pp"))
    return [_build_stage(config, mesh, place, auxiliary, initialized=initialized) for place in places]


def _build_stage(
    config: PretrainConfig, mesh: Mesh, place: int, auxiliary: AuxiliaryLosses, *, initialized: bool
) -> TransformerStage:
    stage = TransformerStage(
        config.model,
        mesh,
        place=place,
        auxiliary=auxiliary,
        dtype=compute_dtype(config.precision),
        recompute=config.recompute_of,
        seed=config.seed,
    )
    stage.z_loss = config.z_loss
    if initialized:
        initialize(stage, config.seed)
    stage.to(device=mesh.device, dtype=master_dtype(config.precision))
    if config.fp8 is not None:
        from training.te import in_fp8

        for block in stage.layers.values():
            block.forward = in_fp8(block.forward, config.fp8)
    if config.compile:
        for block in stage.layers.values():
            # The forward pass alone: the hooks of sharding run around it as ever.
            block.forward = torch.compile(block.forward, dynamic=False)
    return shard_stage(stage, mesh, precision=config.precision)


def full_precision_matmul(device: torch.device) -> None:
    """Keep float32 products at float32 on CUDA, where TF32 would be faster and less exact."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "ieee"
