"""One rank's part of a training run: model, optimizer and position, and one optimizer step of it."""

import math
import time
from dataclasses import dataclass

import torch

from contracts.errors import ShardlineError
from training.config import PretrainConfig
from training.data import SampleSource, read_batch, step_sample_ids
from training.gradients import GradientFinisher, clip, local_parameters
from training.initialization import initialize
from training.mesh import Mesh
from training.model import TransformerStage, compute_dtype, master_dtype
from training.optimizer import LocalAdamW, learning_rate
from training.pipeline import make_engine
from training.sharding import shard_stage


@dataclass(frozen=True)
class StepResult:
    """Numbers of one optimizer step, equal on every rank.

    Args:
        step: Number of the update, from 1.
        loss_nats: Mean over all tokens of the global batch, before the update.
        gradient_norm: Before clipping.
        learning_rate: Used by the update.
        data_wait_s: Time this rank spent reading its rows.
        stop_requested: Some rank was asked to save and end.
    """

    step: int
    loss_nats: float
    gradient_norm: float
    learning_rate: float
    data_wait_s: float
    stop_requested: bool = False


class Trainer:
    """The state of a run on one rank; `step` and `consumed_samples` are its whole position."""

    def __init__(self, config: PretrainConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.stage = build_stage(config, mesh)
        self.parameters = local_parameters(self.stage)
        self.optimizer = LocalAdamW(self.parameters, config.optimizer)
        self.engine = make_engine(self.stage, mesh, config)
        self.finisher = GradientFinisher(self.parameters, mesh, tied=config.model.tied_embeddings)
        self.step = 0
        self.consumed_samples = 0

    def train_step(self, source: SampleSource, *, wants_to_stop: bool = False) -> StepResult:
        """Take the next global batch from `source` and update the parameters.

        Raises:
            ShardlineError: The loss or the gradient is not finite; nothing was updated.
        """
        config = self.config
        started = time.perf_counter()
        sample_ids = step_sample_ids(self.consumed_samples, config, self.mesh.rank("dp"))
        batch = read_batch(source, sample_ids, self.mesh.device)
        data_wait_s = time.perf_counter() - started
        num_tokens = config.global_batch_size * config.seq_length
        loss_share = self.engine.run(batch.inputs, batch.labels, batch.row_ids, num_tokens=num_tokens)
        gradients = self.finisher.finish()
        norm, loss_sum, stops = self.finisher.agree(gradients, loss_share, wants_to_stop=wants_to_stop)
        self._check_finite(loss_sum / num_tokens, norm)
        clip(gradients, norm, config.optimizer.clip_grad)
        lr = learning_rate(self.step + 1, config.optimizer, config.train_steps)
        self.optimizer.step(gradients, lr)
        self._clear_gradients()
        self.step += 1
        self.consumed_samples += config.global_batch_size
        return StepResult(self.step, loss_sum / num_tokens, norm, lr, data_wait_s, stops)

    def _check_finite(self, loss_nats: float, norm: float) -> None:
        if math.isfinite(loss_nats) and math.isfinite(norm):
            return
        raise ShardlineError(
            f"Step {self.step + 1}: the loss is {loss_nats:g} nats and the gradient norm {norm:g}, so "
            f"no update was made. Lower optimizer.lr (now up to {self.config.optimizer.lr:g}), lengthen "
            "optimizer.warmup_steps, or set optimizer.clip_grad. The last checkpoint stays."
        )

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.sharded.grad = None


def build_stage(config: PretrainConfig, mesh: Mesh, *, initialized: bool = True) -> TransformerStage:
    """Build, initialize and shard this rank's stage.

    Args:
        initialized: Fill the weights from the seed; False leaves them undefined, for a checkpoint to fill.
    """
    stage = TransformerStage(
        config.model,
        mesh,
        dtype=compute_dtype(config.precision),
        recompute=config.recompute,
        seed=config.seed,
    )
    if initialized:
        initialize(stage, config.seed)
    stage.to(device=mesh.device, dtype=master_dtype(config.precision))
    return shard_stage(stage, mesh, precision=config.precision)


def full_precision_matmul(device: torch.device) -> None:
    """Keep float32 products at float32 on CUDA, where TF32 would be faster and less exact."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "ieee"
