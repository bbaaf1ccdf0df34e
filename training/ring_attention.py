"""Exact attention over sequences that ranks share: keys and values go round a ring (Liu et al. 2023, arXiv:2310.01889).

A rank keeps its queries and meets the keys of one other rank at a time, while the next ones are on their way; the
results are joined by the softmax's denominators. Backward goes round once more and makes each
piece again from the saved denominators, so a rank holds 1 / size of everything; gradients of keys and values travel
with them. Letters: s this rank's part of the sequence, b batch, n heads, g key-value groups, d head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.attention_kernels import attend, attend_backward, is_fused
from training.context_parallel import ContextParallel

# Elements of a mask, or of the scores where no fused kernel takes the inputs, that are made at a time.
_PIECE = 1 << 22
_MIN_ROWS = 128  # queries of a piece under a window; fewer leave a kernel idle


class RingAttention(nn.Module):
    """Scaled dot-product attention of this rank's part of each sequence to the whole of it.

    Args:
        context: The ranks that share the sequences.
        window: Tokens that a token sees, itself included; None sees all before it. Only with `causal`.
        causal: A token sees itself and what is before it; else all.
    """

    def __init__(self, context: ContextParallel, window: int | None = None, *, causal: bool = True) -> None:
        super().__init__()
        if window is not None and not causal:
            raise ValueError("a window looks back, so it needs a causal mask.")
        self.plan = _Plan(context, window, causal)

    # Messages between ranks and lengths that differ by rank: nothing that a compiled form would gain from.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """(s, b, n, d), twice (s, b, g, d) -> (s, b, n * d).

        Args:
            documents: (b, s x size), int64, of the *whole* sequence: a token sees only tokens of its own number.
            bias: Not taken.
        """
        if bias is not None:
            raise ValueError("biases of scores do not go round a ring.")
        out_bnsd: Tensor = _Ring.apply(q, k, v, documents, self.plan)
        return out_bnsd.permute(2, 0, 1, 3).flatten(2)


@dataclass(frozen=True)
class _Tile:
    """Some of a rank's queries and some of the keys that are its guests.

    Args:
        queries: Of this rank's part.
        keys: Of the guests.
        is_causal: Both are the same tokens.
    """

    queries: slice
    keys: slice
    is_causal: bool


@dataclass(frozen=True)
class _Plan:
    """Who meets whom, and what they see."""

    context: ContextParallel
    window: int | None
    causal: bool

    def source(self, turn: int) -> int:
        """Rank whose keys are here at a turn of the ring."""
        return (self.context.rank - turn) % self.context.size

    def tiles(self, source: int, length: int) -> list[_Tile]:
        """Queries of this rank that see keys of `source`; without a window every rank has as many elements at a turn.

        Args:
            length: Tokens of a rank.
        """
        rank, half = self.context.rank, length // 2
        everything, early, late = slice(0, length), slice(0, half), slice(half, length)
        if not self.causal:
            return [_Tile(everything, everything, False)]
        if self.window is None or self.window >= length * self.context.size:
            if source == rank:
                return [_Tile(everything, everything, True)]
            # Chunks of a lower rank: the early one is before all of ours, the late one behind.
            return [_Tile(everything, early, False) if source < rank else _Tile(late, everything, False)]
        places = zip(self.context.chunks(rank), (early, late), strict=True)
        guests = list(zip(self.context.chunks(source), (early, late), strict=True))
        return [
            _Tile(queries, keys, chunk == guest)
            for chunk, queries in places
            for guest, keys in guests
            if self._reaches(chunk, guest, half)
        ]

    def _reaches(self, chunk: int, guest: int, half: int) -> bool:
        nearest = (chunk - guest - 1) * half + 1 if chunk != guest else 0
        return chunk >= guest and (self.window is None or nearest < self.window)

    def pieces(
        self, tile: _Tile, source: int, q_bnsd: Tensor, documents: Tensor | None
    ) -> Iterator[tuple[slice, slice, Tensor | None, bool]]:
        """Cut a tile so that no mask gets large, and leave out keys that no query of a piece sees.

        Returns:
            Queries, keys, which of them each query sees (None: all), and whether causally.
        """
        rows, columns = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
        is_cut = self.causal and self.window is not None and self.window < q_bnsd.shape[2] * self.context.size
        has_mask = is_cut or documents is not None
        fused = is_fused(q_bnsd, has_mask=has_mask)
        if fused and not has_mask:
            yield tile.queries, tile.keys, None, tile.is_causal
            return
        deep = (1 if documents is None else len(documents)) if fused else q_bnsd.shape[0] * q_bnsd.shape[1]
        size = max(1, _PIECE // (columns * deep))
        whole = q_bnsd.shape[2] * self.context.size
        own = self.context.places(whole, q_bnsd.device)[tile.queries]
        theirs = self.context.places(whole, q_bnsd.device, source)[tile.keys]
        if is_cut:
            size = min(size, max(self.window or 0, _MIN_ROWS))
        for first in range(0, rows, size):
            places = own[first : first + size]
            part = slice(tile.queries.start + first, tile.queries.start + first + len(places))
            near = slice(0, columns)
            if is_cut:  # queries and keys are then of one chunk each
                half = q_bnsd.shape[2] // 2
                before = self._first(self.context.rank, part.start, half) - self._first(source, tile.keys.start, half)
                near = slice(max(0, before - (self.window or 0) + 1), min(columns, before + len(places)))
            keys = slice(tile.keys.start + near.start, tile.keys.start + near.stop)
            if near.start < near.stop:
                yield part, keys, self._mask(places, theirs[near], documents), False

    def _first(self, rank: int, start: int, half: int) -> int:
        """Place in the sequence of token `start` of a rank's part, whose chunks have `half` tokens."""
        return self.context.chunks(rank)[start // half] * half + start % half

    def _mask(self, queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
        """Which keys (columns) each query (row) sees, by their places in the sequence: (1 or b, 1, q, k)."""
        distance = queries[:, None] - keys
        mask = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            mask = mask & (distance < self.window)
        mask = mask[None, None]
        if documents is None:
            return mask
        return mask & (documents[:, None, queries, None] == documents[:, None, None, keys])


class _Traveller:
    """A tensor on its way round the ring: what comes from the rank before takes the place of what goes on."""

    def __init__(self, context: ContextParallel, tag: int) -> None:
        self.group, self.tag = context.group, tag
        ranks = [0] if context.size == 1 else dist.get_process_group_ranks(context.group)
        self.next = ranks[(context.rank + 1) % context.size]
        self.previous = ranks[(context.rank - 1) % context.size]
        self._works: list[dist.Work] = []
        self._held: tuple[Tensor, ...] = ()

    def leave(self, tensor: Tensor) -> None:
        """Start to send `tensor` on and to receive its successor; it must not change until `arrive`."""
        coming = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, self.next, self.group, self.tag),
            dist.P2POp(dist.irecv, coming, self.previous, self.group, self.tag),
        ]
        self._works, self._held = dist.batch_isend_irecv(operations), (tensor, coming)

    def arrive(self) -> Tensor:
        """Wait for what was sent after the last `leave`."""
        for work in self._works:
            work.wait()
        coming = self._held[1]
        self._works, self._held = [], ()
        return coming


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, plan: _Plan) -> Tensor:
        size, exact = plan.context.size, torch.float64 if q.dtype == torch.float64 else torch.float32
        q_bnsd, guests, keys = q.permute(1, 2, 0, 3), torch.stack((k, v)), _Traveller(plan.context, 0)
        out = torch.zeros(q_bnsd.shape, dtype=exact, device=q.device)
        log_sum = torch.full(q_bnsd.shape[:3], float("-inf"), dtype=exact, device=q.device)
        for turn in range(size):
            if turn + 1 < size:
                keys.leave(guests)
            _visit(q_bnsd, guests, documents, (plan, plan.source(turn)), out, log_sum)
            if turn + 1 < size:
                guests = keys.arrive()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum, *(() if documents is None else (documents,)))
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, *more = ctx.saved_tensors
        plan: _Plan = ctx.plan
        documents = more[0] if more else None
        size = plan.context.size
        keys, gradients = _Traveller(plan.context, 0), _Traveller(plan.context, 1)
        q_bnsd, guests = q.permute(1, 2, 0, 3), torch.stack((k, v))
        grad_q = torch.zeros(q_bnsd.shape, dtype=log_sum.dtype, device=q.device)
        for turn in range(size):
            if turn + 1 < size:
                keys.leave(guests)
            mine = torch.zeros(guests.shape, dtype=log_sum.dtype, device=q.device)
            _visit_backward(grad, (q_bnsd, out, log_sum), guests, documents, (plan, plan.source(turn)), grad_q, mine)
            if turn:
                mine += gradients.arrive()
            if size > 1:
                gradients.leave(mine)
            if turn + 1 < size:
                guests = keys.arrive()
        grad_kv = (gradients.arrive() if size > 1 else mine).to(k.dtype)
        return grad_q.permute(2, 0, 1, 3).to(q.dtype), grad_kv[0], grad_kv[1], None, None


def _visit(
    q_bnsd: Tensor,
    guests: Tensor,
    documents: Tensor | None,
    meeting: tuple[_Plan, int],
    out: Tensor,
    log_sum: Tensor,
) -> None:
    """Attend to the guests as well.

    Args:
        guests: Keys and values of a rank: (2, s, b, g, d).
        meeting: The plan and the rank that the guests are from.
        out: (b, n, s, d), over the keys so far; changed.
        log_sum: (b, n, s), likewise.
    """
    plan, source = meeting
    k_bgsd, v_bgsd = guests.permute(0, 2, 3, 1, 4)
    for tile in plan.tiles(source, q_bnsd.shape[2]):
        for rows, keys, mask, is_causal in plan.pieces(tile, source, q_bnsd, documents):
            k, v = k_bgsd[:, :, keys], v_bgsd[:, :, keys]
            more = attend(q_bnsd[:, :, rows], k, v, mask, is_causal=is_causal)
            out[:, :, rows], log_sum[:, :, rows] = _joined(out[:, :, rows], log_sum[:, :, rows], *more)


def _joined(out: Tensor, log_sum: Tensor, more: Tensor, more_log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys as one; a query that has seen nothing has 0 and -inf."""
    total = torch.logaddexp(log_sum, more_log_sum)
    base = total.clamp(min=torch.finfo(total.dtype).min)
    share, more_share = (log_sum - base).exp(), (more_log_sum - base).exp()
    return out * share.unsqueeze(-1) + more * more_share.unsqueeze(-1), total


def _visit_backward(
    grad: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    guests: Tensor,
    documents: Tensor | None,
    meeting: tuple[_Plan, int],
    grad_q: Tensor,
    grad_kv: Tensor,
) -> None:
    """Add the gradients of a visit.

    Args:
        saved: Queries, output and log of the denominators, over all keys.
        guests, meeting: As in `_visit`.
        grad_q: (b, n, s, d); added to.
        grad_kv: (2, s, b, g, d); added to.
    """
    (q_bnsd, out, log_sum), (plan, source) = saved, meeting
    k_bgsd, v_bgsd = guests.permute(0, 2, 3, 1, 4)
    grad_k, grad_v = grad_kv.permute(0, 2, 3, 1, 4)
    for tile in plan.tiles(source, q_bnsd.shape[2]):
        for rows, keys, mask, is_causal in plan.pieces(tile, source, q_bnsd, documents):
            qkv = (q_bnsd[:, :, rows], k_bgsd[:, :, keys], v_bgsd[:, :, keys])
            more_q, more_k, more_v = attend_backward(
                grad[:, :, rows], qkv, out[:, :, rows], log_sum[:, :, rows], mask, is_causal=is_causal
            )
            grad_q[:, :, rows] += more_q
            grad_k[:, :, keys] += more_k
            grad_v[:, :, keys] += more_v
