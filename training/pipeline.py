"""Forward and backward of one optimizer step over the micro-batches: with one stage, or as a pipeline.

All uses of `torch.distributed.pipelining` stand here. Shapes are given, never inferred: inference
would run a real forward and backward pass. Every engine has the same call and the same result.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward

from training.config import PretrainConfig
from training.data import Batch
from training.mesh import Mesh
from training.model import TransformerStage, compute_dtype, master_dtype
from training.sharding import set_last_micro_batch


class Engine(Protocol):
    """Runs the micro-batches of a step and leaves the gradients in the parameters."""

    def run(self, batch: Batch, *, num_tokens: float) -> Tensor:
        """Run one step.

        Args:
            batch: This data-parallel rank's rows.
            num_tokens: Tokens of the whole global batch; divides the loss.

        Returns:
            (): this rank's share of the summed loss, in nats; zero on all stages but the last.
        """
        ...


def make_engine(stages: Sequence[TransformerStage], mesh: Mesh, config: PretrainConfig) -> Engine:
    """Return the engine for the layout."""
    if mesh.size("pp") == 1:
        return SingleStage(stages[0], mesh, config)
    return Pipeline(stages, mesh, config)


class SingleStage:
    """Gradient accumulation without a pipeline."""

    def __init__(self, stage: TransformerStage, mesh: Mesh, config: PretrainConfig) -> None:
        self.stage, self.mesh, self.config = stage, mesh, config

    def run(self, batch: Batch, *, num_tokens: float) -> Tensor:
        parts = batch.micro_batches(self.config.micro_batch_size)
        total = torch.zeros((), dtype=master_dtype(self.config.precision), device=self.mesh.device)
        self.stage.auxiliary.factor = 1.0 / num_tokens
        for number, part in enumerate(parts):
            set_last_micro_batch(self.stage, number == len(parts) - 1, self.mesh)
            loss = self.stage(part.inputs, labels=part.labels, row_ids=part.row_ids, **part.context)
            (loss / num_tokens).backward()
            total += loss.detach()
        return total


class Pipeline:
    """A schedule of `torch.distributed.pipelining`: 1F1B, interleaved where a rank has several stages, or zero bubble.

    1F1B: Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1 and 2.2.2. Zero bubble: Qi et al. 2023,
    arXiv:2401.10241; `zero_bubble` is its ZB-H1, `zbv` its ZB-V of section 6.
    """

    def __init__(self, stages: Sequence[TransformerStage], mesh: Mesh, config: PretrainConfig) -> None:
        self.auxiliary, self.mesh, self.config = stages[0].auxiliary, mesh, config
        self.num_tokens = 1.0
        made: list[Any] = [_pipeline_stage(stage, mesh, config) for stage in stages]
        kind: Any = {
            "1f1b": Schedule1F1B if len(made) == 1 else ScheduleInterleaved1F1B,
            "zero_bubble": ScheduleInterleavedZeroBubble,
            "zbv": ScheduleZBVZeroBubble,
        }[config.layout.schedule]
        held = made[0] if kind is Schedule1F1B else made
        self.schedule = kind(held, config.num_micro_batches, loss_fn=self._loss, scale_grads=False)

    def run(self, batch: Batch, *, num_tokens: float) -> Tensor:
        self.num_tokens = num_tokens
        self.auxiliary.factor = 1.0 / num_tokens
        total = torch.zeros((), dtype=master_dtype(self.config.precision), device=self.mesh.device)
        arguments = (batch.inputs,) if self.mesh.is_first_stage else ()
        losses: list[Tensor] | None = [] if self.mesh.is_last_stage else None
        told: dict[str, Any] = {"labels": batch.labels, "row_ids": batch.row_ids, **batch.context}
        self.schedule.step(
            *arguments,
            target=batch.labels if self.mesh.is_last_stage else None,
            losses=losses,
            return_outputs=False,
            **told,
        )
        if losses:
            total += torch.stack([loss.detach() for loss in losses]).sum() * num_tokens
        return total

    def _loss(self, loss_sum: Tensor, _target: Tensor) -> Tensor:
        return loss_sum / self.num_tokens


class OwnPipeline:
    """1F1B in few lines on plain sends and receives: the oracle that the tests hold `Pipeline` against."""

    def __init__(self, stage: TransformerStage, mesh: Mesh, config: PretrainConfig) -> None:
        self.stage, self.mesh, self.config = stage, mesh, config
        ranks = dist.get_process_group_ranks(mesh.group("pp"))
        place = mesh.rank("pp")
        self.previous = None if mesh.is_first_stage else ranks[place - 1]
        self.next = None if mesh.is_last_stage else ranks[place + 1]
        self.example = _activation(mesh, config)

    def run(self, batch: Batch, *, num_tokens: float) -> Tensor:
        parts = batch.micro_batches(self.config.micro_batch_size)
        total = torch.zeros((), dtype=master_dtype(self.config.precision), device=self.mesh.device)
        self.stage.auxiliary.factor = 1.0 / num_tokens
        waiting: list[tuple[Tensor, Tensor]] = []
        sends: list[dist.Work | None] = []
        num_ahead = min(len(parts), self.mesh.size("pp") - 1 - self.mesh.rank("pp"))
        num_done = 0
        for number, part in enumerate(parts):
            x = part.inputs if self.previous is None else self._receive(self.previous)
            out = self.stage(x, labels=part.labels, row_ids=part.row_ids, **part.context)
            if self.next is None:
                total += out.detach()
                out = out / num_tokens
            else:
                sends.append(dist.isend(out.detach().contiguous(), self.next))
            waiting.append((x, out))
            if number >= num_ahead:
                num_done += 1
                sends.append(self._backward(*waiting.pop(0), is_last=num_done == len(parts)))
        while waiting:
            num_done += 1
            sends.append(self._backward(*waiting.pop(0), is_last=num_done == len(parts)))
        for work in sends:
            if work is not None:
                work.wait()
        return total

    def _receive(self, source: int) -> Tensor:
        x = torch.empty_like(self.example)
        dist.recv(x, source)
        return x.requires_grad_()

    def _backward(self, x: Tensor, out: Tensor, *, is_last: bool) -> dist.Work | None:
        set_last_micro_batch(self.stage, is_last, self.mesh)
        if self.next is None:
            out.backward()
        else:
            gradient = torch.empty_like(out)
            dist.recv(gradient, self.next)
            out.backward(gradient)
        if self.previous is None or x.grad is None:
            return None
        return dist.isend(x.grad, self.previous)


def _activation(mesh: Mesh, config: PretrainConfig) -> Tensor:
    tp, length = mesh.tensor_parallel, config.seq_length + config.decoder_length
    length //= mesh.size("cp") * (tp.size if tp.sequence_parallel else 1)
    shape = (length, config.micro_batch_size, config.model.hidden_size)
    return torch.empty(shape, dtype=compute_dtype(config.precision), device=mesh.device)


class _SharingStage(PipelineStage):
    """A stage whose gradients, or parameters too, are shared by data ranks between micro-batches.

    PyTorch's stage keeps whole gradients until the last micro-batch. Here each backward pass sums its
    gradients over the ranks, which keep their parts (and, with `shard: parameters`, gives up the gathered weights).
    """

    shares_parameters = False

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        if backward_type != "full" or not isinstance(self.submod, FSDPModule):
            raise RuntimeError("gradients are shared after whole backward passes")
        self.submod.set_is_last_backward(False)
        self.submod.set_reshard_after_backward(self.shares_parameters)
        self.submod.set_requires_gradient_sync(True)
        grads = stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        return grads, None


def _pipeline_stage(stage: TransformerStage, mesh: Mesh, config: PretrainConfig) -> PipelineStage:
    """Wrap a stage, with tensors of the shapes and dtypes of its input and output."""
    activation = _activation(mesh, config).requires_grad_()
    tokens = torch.zeros(config.micro_batch_size, config.seq_length, dtype=torch.int64, device=mesh.device)
    loss = torch.zeros((), dtype=master_dtype(config.precision), device=mesh.device, requires_grad=True)
    shard = config.layout.shard
    made = (_SharingStage if shard in ("gradients", "parameters") else PipelineStage)(
        stage,
        stage.place,
        mesh.layout.num_stages,
        mesh.device,
        input_args=(tokens if stage.is_first else activation,),
        output_args=(loss if stage.is_last else activation,),
        group=mesh.group("pp"),
    )
    if isinstance(made, _SharingStage):
        made.shares_parameters = shard == "parameters"
    return made
