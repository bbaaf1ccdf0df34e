"""One save of a state that all ranks hold parts of: written by each rank, published by the first.

A checkpoint is written under `step-N.tmp` and gets its name in one step, once every rank has all of
its bytes and their digests: whatever ends a save before that leaves the older checkpoints as they were.
"""

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from contracts.files import sync, write_atomically
from training.checkpoint_files import Planner, Writer
from training.step_folders import MANIFEST, CheckpointInfo, list_checkpoints


@dataclass(frozen=True)
class Agreement:
    """Which rank writes which part of a state; the same for every save of a run, whose tensors stay where they are.

    Args:
        plan: What this rank writes.
        parts: Stored name to this rank's part, of what it writes.
        metadata: Of the whole state, on the first rank.
    """

    plan: SavePlan
    parts: Mapping[str, Tensor]
    metadata: Metadata | None


def agree(tensors: Mapping[str, Tensor]) -> Agreement:
    """Agree with the other ranks who writes what; every rank calls it with its own `state_tensors`."""
    is_first = dist.get_rank() == 0
    planner, metadata = Planner({}), None
    planner.set_up_planner(dict(tensors), is_coordinator=is_first)
    plans: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    dist.gather_object(planner.create_local_plan(), plans)
    if plans is not None:
        plans, metadata = planner.create_global_plan(plans)
        plans = Writer(Path()).prepare_global_plan(plans)
    found: list[Any] = [None]
    dist.scatter_object_list(found, plans)
    plan: SavePlan = found[0]
    mine = {name: tensors[name] for name in dict.fromkeys(item.index.fqn for item in plan.items)}
    parts = {name: part.to_local() if isinstance(part, DTensor) else part for name, part in mine.items()}
    return Agreement(plan, parts, metadata)


class Save:
    """A save in three steps. `prepare` and `settle` are called by all ranks together; `write` by each for itself.

    No step raises what the disk says: `settle` tells every rank what went wrong on any, so that all of
    them decide the same. After a failure the three steps can be taken again.

    Args:
        agreement: Who writes what.
        folder: The step folder to make; replaced if it exists.
        info: Its manifest; `files` is filled in.
    """

    def __init__(self, agreement: Agreement, folder: Path, info: CheckpointInfo) -> None:
        self.folder, self.info = folder, info
        self._agreement, self._parts = agreement, agreement.parts
        self._unfinished = folder.with_suffix(".tmp")
        self._writer = Writer(self._unfinished)
        self._results: list[Any] = []
        self._failure: str | None = None

    def prepare(self) -> None:
        """Make the unfinished folder."""
        failure: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                shutil.rmtree(self._unfinished, ignore_errors=True)
                self._unfinished.mkdir(parents=True)
            except OSError as error:
                failure[0] = reason_of(error)
        dist.broadcast_object_list(failure)
        self._failure, self._results, self._writer = failure[0], [], Writer(self._unfinished)

    def stage(self, buffers: dict[str, Tensor]) -> None:
        """Copy what this rank will write, so that the state may change; before the first `write`.

        Args:
            buffers: Stored name to memory of earlier saves; what is missing is added.
        """
        try:
            _copy(self._agreement.parts, buffers)
        except Exception as error:  # such as no memory: a save that failed, not a run
            self._failure = reason_of(error)
        self._parts = buffers

    def write(self) -> None:
        """Write this rank's file; a failure is kept for `settle`."""
        if self._failure is not None:
            return
        try:
            written = self._writer.write_data(self._agreement.plan, Planner(self._parts))
            written.wait()
            self._results = written.value()
        except Exception as error:  # whatever ended a rank's writing, all must hear of it
            self._failure = reason_of(error)

    def settle(self) -> str | None:
        """Publish the checkpoint if every rank has written its part.

        Returns:
            What went wrong and on which rank; None: the checkpoint is whole and has its name.
        """
        mine = (self._failure, self._results, self._writer.digests)
        every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, every)
        outcome: list[str | None] = [None]
        if every is not None:
            failures = [f"rank {rank}: {failure}" for rank, (failure, _, _) in enumerate(every) if failure]
            outcome[0] = failures[0] if failures else self._publish(every)
            if outcome[0] is not None:
                shutil.rmtree(self._unfinished, ignore_errors=True)
        dist.broadcast_object_list(outcome)
        return outcome[0]

    def _publish(self, every: list[Any]) -> str | None:
        if self._agreement.metadata is None:
            raise RuntimeError("the first rank has the metadata")
        try:
            self._writer.finish(self._agreement.metadata, [results for _, results, _ in every])
            files = {name: facts for _, _, digests in every for name, facts in digests.items()}
            publish(self._unfinished, self.folder, replace(self.info, files=files | self._writer.digests))
        except OSError as error:
            return reason_of(error)
        return None


def _copy(parts: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> None:
    devices = {part.device for part in parts.values() if part.is_cuda}
    with contextlib.ExitStack() as stack:
        for device in devices:  # one: a rank has one device; its own stream runs beside the next pass
            stack.enter_context(torch.cuda.device(device))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            stack.enter_context(torch.cuda.stream(stream))
        for name, part in parts.items():
            if name not in buffers:
                buffers[name] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            buffers[name].copy_(part, non_blocking=True)
        if devices:
            torch.cuda.current_stream().synchronize()


def reason_of(error: BaseException) -> str:
    """Say an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def publish(unfinished: Path, folder: Path, info: CheckpointInfo) -> None:
    """Write the manifest and give the folder its name; everything is on the disk before it counts."""
    write_atomically(unfinished / MANIFEST, info.to_json())
    if folder.exists():
        replaced = folder.with_suffix(".old")
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
        unfinished.rename(folder)
        shutil.rmtree(replaced)
    else:
        unfinished.rename(folder)
    sync(folder.parent)


def prune(root: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` whole checkpoints; with none whole, remove nothing."""
    found = list_checkpoints(root)
    whole = [item for item in found if item.problem is None]
    if not whole:
        return
    oldest_kept = whole[: max(1, keep_last)][-1].step
    for item in found:
        if item.step < oldest_kept:
            shutil.rmtree(item.path)
