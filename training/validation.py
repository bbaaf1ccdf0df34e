"""The loss on held-out rows, at the run's own layout."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from training.config import IGNORE_INDEX
from training.data import Source, read_batch
from training.model import compute_dtype
from training.scoring import Scorer
from training.trainer import Trainer


def validation_losses(trainer: Trainer, sources: Mapping[str, tuple[Source, int]]) -> dict[str, float]:
    """Return `valid_loss_nats` of the run's own held-out rows (named "") and `valid_loss_nats/NAME` of other sets.

    With a pair head, `valid_pair_loss_nats` and `valid_pair_accuracy` too: mean over rows, and share that is right.
    """
    found: dict[str, float] = {}
    for name, (source, num_rows) in sources.items():
        suffix = f"/{name}" if name else ""
        if not trainer.config.model.pair_head:
            found[f"valid_loss_nats{suffix}"] = validation_loss(trainer, source, num_rows)
            continue
        tally = torch.zeros(3, dtype=torch.float64, device=trainer.mesh.device)
        _set_tally(trainer, tally)
        found[f"valid_loss_nats{suffix}"] = validation_loss(trainer, source, num_rows)
        _set_tally(trainer, None)
        dist.all_reduce(tally)
        loss, right, rows = tally.tolist()
        found |= {f"valid_pair_loss_nats{suffix}": loss / rows, f"valid_pair_accuracy{suffix}": right / rows}
    return found


def _set_tally(trainer: Trainer, tally: torch.Tensor | None) -> None:
    """Count rows on the ranks that have their first token."""
    for stage in trainer.stages:
        if stage.pair_head is not None:
            stage.pair_head.tally = tally if trainer.mesh.rank("cp") == 0 else None


def validation_loss(trainer: Trainer, source: Source, num_rows: int) -> float:
    """Mean loss in nats over the first `num_rows` rows, the same at every call and layout."""
    config, mesh = trainer.config, trainer.mesh
    scorer = Scorer(trainer.stages, mesh, dtype=compute_dtype(config.precision))
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    size, dp = config.micro_batch_size, mesh.size("dp")
    # Every rank makes as many passes, since they gather weights together; a rank without rows left repeats the
    # last one and counts nothing of it.
    for first in range(size * mesh.rank("dp"), -(-num_rows // (size * dp)) * size * dp, size * dp):
        wanted = np.arange(first, first + size)
        part = read_batch(source, np.minimum(wanted, num_rows - 1), mesh.device)
        labels = part.labels.clone()
        labels[torch.from_numpy(wanted >= num_rows)] = IGNORE_INDEX
        context = dict(part.context)
        if "pair_labels" in context:
            context["pair_labels"] = context["pair_labels"].clone()
            context["pair_labels"][torch.from_numpy(wanted >= num_rows)] = IGNORE_INDEX
        log_probs, _ = scorer.log_probs(part.inputs, labels, context)
        sums[0] -= log_probs.double().sum()
        sums[1] += (labels != IGNORE_INDEX).sum()
    # A pass without backward leaves the parameters gathered; the next update would not reach that copy.
    for module in (module for stage in trainer.stages for module in stage.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()
    dist.all_reduce(sums, group=mesh.group("dp"))
    return float(sums[0] / sums[1])
