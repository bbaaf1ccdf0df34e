"""Which part of a sequence a context-parallel rank has: two chunks, one early and one late.

Of 2 x size equal chunks, rank r has chunk r and chunk 2 x size - 1 - r. Under a causal mask a late token sees
more than an early one, so these pairs give every rank the same work (Brandon et al. 2023, arXiv:2311.09431,
call it striping; Dubey et al. 2024, arXiv:2407.21783, section 3.3.2, use these pairs).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextParallel:
    """The context-parallel group as a layer sees it.

    Args:
        group: Process group of the ranks that share each sequence.
        rank: This rank's place in it.
        size: Its number of ranks; 1 leaves sequences whole.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    def chunks(self, rank: int) -> tuple[int, int]:
        """Numbers of the two chunks that a rank has."""
        return rank, 2 * self.size - 1 - rank

    def places(self, length: int, device: torch.device, rank: int | None = None) -> Tensor:
        """Place in the whole sequence of each token of a rank (this one if None): (length / size,), int64.

        Args:
            length: Of the whole sequence.
        """
        everything = torch.arange(length, device=device)
        return self.cut(everything, 0, rank)

    def cut(self, x: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """Return the part of a rank (this one if None) of something that has the whole sequence along `dim`.

        Raises:
            ValueError: The length is not divisible by the number of chunks.
        """
        if self.size == 1:
            return x
        length = x.shape[dim]
        if length % (2 * self.size):
            raise ValueError(f"a sequence of {length} tokens does not make {2 * self.size} equal chunks.")
        chunk = length // (2 * self.size)
        first, second = self.chunks(self.rank if rank is None else rank)
        return torch.cat((x.narrow(dim, first * chunk, chunk), x.narrow(dim, second * chunk, chunk)), dim)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Put the parts of all ranks together again, on every rank; without gradients."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)


WHOLE = ContextParallel()  # sequences that are not shared
