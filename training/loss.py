"""Output projection and cross-entropy as one step over a vocabulary that is cut over ranks.

Full logits are never held: tokens are taken in chunks, and the gradient of a chunk is made while
its logits are at hand, so backward has no second projection to do. Letters: s sequence, b batch,
h hidden, t tokens of a chunk, v this rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from training.collectives import enter_tensor_parallel
from training.config import IGNORE_INDEX
from training.mesh import TensorParallel

# Logits of a chunk: on the CPU 16 MiB of float32, which is large enough for the matrix product and stays
# near the caches; on a GPU 512 MiB, since small products leave it idle.
CPU_CHUNK_LOGITS = 1 << 22
GPU_CHUNK_LOGITS = 1 << 27
MIN_CHUNK_TOKENS = 256


def output_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    tp: TensorParallel,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    keep: list[Tensor] | None = None,
    skips_ignored: bool = False,
) -> Tensor:
    """Sum the cross-entropy of the next token over the positions that count.

    The caller divides by the token count of the whole optimizer step. Padding rows of `weight`
    (ids from `vocab_size` on) take no part in the softmax.

    Args:
        hidden: (s, b, h), or (s/tp, b, h) under sequence parallelism.
        weight: (padded vocabulary / tp, h).
        labels: (b, s), int64, with IGNORE_INDEX where no loss is due.
        vocab_size: Ids that can be predicted.
        bias: (padded vocabulary / tp,), added to the logits.
        z_loss: Weight of log(Z)^2, where Z is the softmax's denominator (Chowdhery et al. 2022, PaLM,
            arXiv:2204.02311, section 5). It enters the gradient and not the value, so that a reported
            loss can be compared with that of other runs.
        keep: Receives the loss of each token, (s x b,); IGNORE_INDEX where none was due.
        skips_ignored: Make logits of no token whose label is IGNORE_INDEX, which pays where most are, as in BERT's
            rows. Their number is read, for which a device must be waited for.

    Returns:
        (), in nats; float64 for float64 input, else float32.
    """
    whole, wanted = enter_tensor_parallel(hidden, tp), labels.t().flatten()
    if skips_ignored and keep is None:
        counted = (wanted != IGNORE_INDEX).nonzero().squeeze(1)
        whole, wanted = whole.flatten(0, 1).index_select(0, counted).unsqueeze(1), wanted[counted]
    needs_gradient = torch.is_grad_enabled()
    loss: Tensor = _OutputLoss.apply(whole, weight, bias, wanted, vocab_size, tp, (z_loss, keep), needs_gradient)
    return loss


@torch.no_grad()
def token_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, tp: TensorParallel, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, without gathering logits.

    Args:
        hidden: As in `output_loss`.
        targets: (b, s), int64; IGNORE_INDEX gives 0 and False.

    Returns:
        log_probs: (b, s), float32 (float64 for float64 input), in nats.
        is_greedy: (b, s), bool: no token has a higher logit than the target.
    """
    flat = enter_tensor_parallel(hidden, tp).flatten(0, 1)
    wanted = targets.t().flatten()
    vocabulary = _Vocabulary(weight, vocab_size, tp, bias)
    log_probs, greedy = [], []
    for start, stop in _chunks(len(flat), weight):
        target = wanted[start:stop]
        logits = vocabulary.logits(flat[start:stop])
        vocabulary.subtract_highest(logits)
        at_target = vocabulary.at(logits, target)
        total = logits.exp_().sum(-1)
        both = torch.stack((total, at_target))
        vocabulary.sum_over_ranks(both)
        counts = target != IGNORE_INDEX
        log_probs.append(torch.where(counts, both[1] - both[0].log(), 0.0))
        greedy.append(counts & (both[1] >= 0))
    shape = targets.t().shape
    return torch.cat(log_probs).view(shape).t(), torch.cat(greedy).view(shape).t()


@torch.no_grad()
def output_logits(
    hidden: Tensor, weight: Tensor, *, vocab_size: int, tp: TensorParallel, bias: Tensor | None = None
) -> Tensor:
    """Logits of every position over the true vocabulary, on every rank: for comparisons, not for training.

    Returns:
        (b, s, vocab_size), in the dtype of `hidden`.
    """
    whole = enter_tensor_parallel(hidden, tp)
    logits = F.linear(whole, weight, bias)
    if tp.size > 1:
        parts = [torch.empty_like(logits) for _ in range(tp.size)]
        dist.all_gather(parts, logits.contiguous(), group=tp.group)
        logits = torch.cat(parts, dim=-1)
    return logits[..., :vocab_size].transpose(0, 1).contiguous()


class _Vocabulary:
    """This rank's rows of the output matrix, without padding."""

    def __init__(self, weight: Tensor, vocab_size: int, tp: TensorParallel, bias: Tensor | None = None) -> None:
        self.first = tp.rank * weight.shape[0]
        self.weight = weight[: max(0, min(vocab_size - self.first, weight.shape[0]))]
        self.bias = None if bias is None else bias[: len(self.weight)]
        self.tp = tp

    def logits(self, hidden: Tensor) -> Tensor:
        """(t, h) -> (t, v), at least float32."""
        logits = hidden @ self.weight.t()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if self.bias is None else logits.add_(self.bias)

    def subtract_highest(self, logits: Tensor) -> Tensor:
        """Subtract each token's highest logit over all ranks, in place, and return it: (t,)."""
        highest = (
            logits.amax(-1) if logits.shape[1] else logits.new_full((logits.shape[0],), torch.finfo(logits.dtype).min)
        )
        if self.tp.size > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.tp.group)
        logits.sub_(highest.unsqueeze(1))
        return highest

    def at(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logit of each token's target, 0 where another rank holds it: (t,)."""
        place, is_here = self.place(target)
        if not logits.shape[1]:
            return logits.new_zeros(len(target))
        return torch.where(is_here, logits.gather(1, place.unsqueeze(1)).squeeze(1), 0.0)

    def place(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target on this rank (0 where it is elsewhere), and whether it is here."""
        local = target - self.first
        is_here = (local >= 0) & (local < self.weight.shape[0])
        return torch.where(is_here, local, 0), is_here

    def sum_over_ranks(self, x: Tensor) -> None:
        if self.tp.size > 1:
            dist.all_reduce(x, group=self.tp.group)


def _chunks(num_tokens: int, weight: Tensor) -> list[tuple[int, int]]:
    logits = GPU_CHUNK_LOGITS if weight.is_cuda else CPU_CHUNK_LOGITS
    size = max(MIN_CHUNK_TOKENS, logits // max(1, weight.shape[0]))
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        vocab_size: int,
        tp: TensorParallel,
        options: tuple[float, list[Tensor] | None],
        needs_gradient: bool,
    ) -> Tensor:
        z_loss, keep = options
        flat = hidden.flatten(0, 1)
        vocabulary = _Vocabulary(weight, vocab_size, tp, bias)
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        total_loss = torch.zeros((), dtype=exact, device=weight.device)
        grad_hidden = torch.empty_like(flat) if needs_gradient else None
        grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if needs_gradient else None
        grad_bias = torch.zeros(bias.shape, dtype=exact, device=bias.device) if bias is not None else None
        token_losses: list[Tensor] = []
        for start, stop in _chunks(len(flat), weight):
            x, target = flat[start:stop], labels[start:stop]
            probs, losses = _softmax_and_losses(vocabulary, x, target, z_loss)
            total_loss += losses.sum()
            if keep is not None:
                token_losses.append(torch.where(target == IGNORE_INDEX, float(IGNORE_INDEX), losses))
            if grad_hidden is None or grad_weight is None:
                continue
            grad_exact = _minus_one_at_target(vocabulary, probs, target)
            if grad_bias is not None:
                grad_bias[: vocabulary.weight.shape[0]] += grad_exact.sum(0)
            grad_logits = grad_exact.to(weight.dtype)
            torch.mm(grad_logits, vocabulary.weight, out=grad_hidden[start:stop])
            rows = grad_weight[: vocabulary.weight.shape[0]]
            if weight.dtype == exact:
                rows.addmm_(grad_logits.t(), x)
            else:
                rows += grad_logits.t() @ x
        if keep is not None:
            keep.append(torch.cat(token_losses))
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden.view_as(hidden), grad_weight, grad_bias)
            ctx.weight_dtype = weight.dtype
        return total_loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        scaled = (grad_weight * grad).to(ctx.weight_dtype)
        scaled_bias = None if grad_bias is None else (grad_bias * grad).to(ctx.weight_dtype)
        # A scalar tensor keeps its own precision in the product; rounding it to 16 bits would bend the gradient.
        return grad_hidden * grad, scaled, scaled_bias, None, None, None, None, None


def _softmax_and_losses(vocabulary: _Vocabulary, x: Tensor, target: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    logits = vocabulary.logits(x)
    highest = vocabulary.subtract_highest(logits)
    at_target = vocabulary.at(logits, target)
    exponentials = logits.exp_()
    both = torch.stack((exponentials.sum(-1), at_target))
    vocabulary.sum_over_ranks(both)
    total, at_target = both[0], both[1]
    losses = torch.where(target == IGNORE_INDEX, 0.0, total.log() - at_target)
    # An ignored token gets no gradient: its probabilities become 0, and its label is on no rank.
    factor = torch.where(target == IGNORE_INDEX, 0.0, 1.0 / total)
    if z_loss:
        factor *= 1.0 + 2.0 * z_loss * (highest + total.log())
    return exponentials.mul_(factor.unsqueeze(1)), losses


def _minus_one_at_target(vocabulary: _Vocabulary, probs: Tensor, target: Tensor) -> Tensor:
    """Turn probabilities into the gradient of the summed loss with respect to the logits, in place."""
    place, is_here = vocabulary.place(target)
    if probs.shape[1]:
        probs.scatter_add_(1, place.unsqueeze(1), -is_here.to(probs.dtype).unsqueeze(1))
    return probs
