"""The training loss of each subset of the data, token by token, from passes that are made anyway."""

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from contracts.errors import ConfigError
from preprocessing.samples.gpt import GPTSamples
from training.config import IGNORE_INDEX
from training.data import Source
from training.rows import CurriculumSamples, DocumentRows
from training.trainer import Trainer


class SubsetLosses:
    """Sums the losses of a step by the subset that each predicted token is from; every rank calls it.

    Raises:
        ConfigError: The samples do not say which documents they hold in which order.
    """

    def __init__(self, trainer: Trainer, source: Source) -> None:
        samples = source.samples if isinstance(source, DocumentRows) else source
        plain = samples.samples if isinstance(samples, CurriculumSamples) else samples
        if not isinstance(samples, GPTSamples | CurriculumSamples) or not isinstance(plain, GPTSamples):
            raise ConfigError("subset_losses needs samples whose tokens stand in the order of their documents.")
        self.trainer, self.samples = trainer, samples
        mesh = trainer.mesh
        self.has_losses = mesh.is_last_stage and mesh.rank("tp") == 0
        tables = [dataset.document_subsets() for dataset in plain.datasets]
        self.names = sorted({name for _, names in tables for name in names})
        place = {name: n for n, name in enumerate(self.names)}
        self.codes = [np.array([place[name] for name in names])[codes] for codes, names in tables]

    def begin(self) -> None:
        """Keep the losses of the next step."""
        self.trainer.stages[-1].kept_losses = []

    def end(self, consumed_before: int, rows: int) -> dict[str, float]:
        """Return `loss_nats/<subset>` of the step, equal on every rank, for the subsets that were in it."""
        mesh, kept = self.trainer.mesh, self.trainer.stages[-1].kept_losses or []
        self.trainer.stages[-1].kept_losses = None
        sums = torch.zeros(2, len(self.names), dtype=torch.float64)
        if self.has_losses:
            share = rows // mesh.size("dp")
            first = consumed_before + mesh.rank("dp") * share
            subsets = torch.from_numpy(np.stack([self._label_subsets(n) for n in range(first, first + share)]))
            subsets = mesh.context_parallel.cut(subsets, 1)
            size, length = self.trainer.config.micro_batch_size, subsets.shape[1]
            losses = torch.cat([part.view(length, size).t() for part in kept]).cpu().double()
            counts = losses != IGNORE_INDEX
            sums[0].index_add_(0, subsets[counts], losses[counts])
            sums[1].index_add_(0, subsets[counts], torch.ones_like(losses[counts]))
        sums = sums.to(mesh.device)
        dist.all_reduce(sums)
        totals, tokens = sums.tolist()
        return {f"loss_nats/{n}": t / k for n, t, k in zip(self.names, totals, tokens, strict=True) if k}

    def _label_subsets(self, sample: int) -> npt.NDArray[np.int64]:
        """Subset of each token that a sample predicts: (s,)."""
        spans = self.samples.documents_of(sample)
        codes = [int(self.codes[span.dataset][span.document]) for span in spans]
        return np.repeat(np.array(codes, dtype=np.int64), [span.length for span in spans])[1:]
