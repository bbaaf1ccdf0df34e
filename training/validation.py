"""The loss on held-out rows, at the run's own layout."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from training.config import IGNORE_INDEX
from training.data import Source, read_batch, step_sample_ids
from training.model import compute_dtype
from training.scoring import Scorer
from training.trainer import Trainer


def validation_loss(trainer: Trainer, source: Source) -> float:
    """Mean loss in nats over `valid_batches` global batches, the same rows at every call and layout."""
    config, mesh = trainer.config, trainer.mesh
    scorer = Scorer(trainer.stages, mesh, dtype=compute_dtype(config.precision))
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    rows = config.global_batch_size
    for number in range(config.valid_batches):
        ids = step_sample_ids(number * rows, rows, dp_rank=mesh.rank("dp"), dp_size=mesh.size("dp"))
        batch = read_batch(source, ids, mesh.device)
        for part in batch.micro_batches(config.micro_batch_size):
            log_probs, _ = scorer.log_probs(part.inputs, part.labels, part.context)
            sums[0] -= log_probs.double().sum()
            sums[1] += (part.labels != IGNORE_INDEX).sum()
    # A pass without backward leaves the parameters gathered; the next update would not reach that copy.
    for module in (module for stage in trainer.stages for module in stage.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()
    dist.all_reduce(sums, group=mesh.group("dp"))
    return float(sums[0] / sums[1])
