"""A mixture of experts in place of an MLP: router, dispatch, experts, and the losses that keep them busy.

Nothing is dropped unless a capacity is set. Every tensor-parallel rank routes all tokens and holds
its rows and columns of every expert, so one sum over the ranks ends the layer, as it ends an MLP.
Balance is measured within each row, so that no layout and no micro-batch size changes it.
Letters: s sequence, b batch, h hidden, t tokens (s x b), k choices of a token, e experts, f inner width.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from training.activation import activate
from training.backend import Backend
from training.collectives import enter_tensor_parallel, leave_tensor_parallel
from training.context_parallel import WHOLE, ContextParallel
from training.expert_matrices import ExpertMatrices, Matrix, combine, dispatch, matrix_pair, sorting
from training.mesh import TOGETHER, ExpertParallel, TensorParallel
from training.model_config import ModelConfig, MoeConfig
from training.parameters import ParamSpec


class AuxiliaryLosses:
    """What the layers of a stage add to the objective beside the output loss, and how strongly.

    Attributes:
        factor: Gradient of the step's objective with respect to a loss summed over tokens, which the engine
            sets before backward: 1 / tokens of the global batch (times the loss scale under fp16).
        total: Sum over tokens and layers of the weighted losses whose backward has run, on this rank; ().
    """

    def __init__(self) -> None:
        self.factor = 0.0
        self.total: Tensor | None = None

    def take(self) -> Tensor | None:
        """Return `total` and begin anew."""
        total, self.total = self.total, None
        return total


def with_loss(x: Tensor, loss: Tensor, auxiliary: AuxiliaryLosses) -> Tensor:
    """Return `x`; in backward `loss` joins the objective, and `auxiliary.total`.

    Args:
        loss: (), summed over tokens as the output loss is.
    """
    out: Tensor = _WithLoss.apply(x, loss, auxiliary)
    return out


class Experts(nn.Module):
    """Router and experts, with the norm before them; (s, b, h) or (s/tp, b, h) -> the same."""

    def __init__(
        self,
        backend: Backend,
        model: ModelConfig,
        tp: TensorParallel,
        layer: str,
        *,
        has_norm: bool,
        auxiliary: AuxiliaryLosses,
        context: ContextParallel = WHOLE,
        dealt: ExpertParallel = TOGETHER,
    ) -> None:
        super().__init__()
        if model.moe is None:
            raise ValueError("model.moe is not set")
        self.moe: MoeConfig = model.moe
        self.tp, self.activation, self.auxiliary, self.context = tp, model.activation, auxiliary, context
        self.num_sparse_layers = sum(model.has_experts(n) for n in range(model.num_layers))
        hidden, name = model.hidden_size, f"{layer}.mlp"
        self.norm = backend.norm(f"{name}.norm") if has_norm else None
        self.router = Matrix(ParamSpec(f"{name}.router.weight", None, (self.moe.num_experts, hidden), tp.size > 1), tp)
        names = [f"{name}.experts.{n}" for n in range(self.moe.num_experts)]
        sizes, has_gate = (hidden, model.expert_ffn_hidden_size), model.is_gated
        self.experts = ExpertMatrices(names, sizes, tp, activation=model.activation, has_gate=has_gate, dealt=dealt)
        self.shared_gate_up: Matrix | None = None
        if shared := self.moe.shared_ffn_hidden_size:
            self.shared_gate_up, self.shared_down = matrix_pair(
                [f"{name}.shared"], (hidden, shared), tp, has_gate=has_gate
            )
            self.shared_router = Matrix(ParamSpec(f"{name}.shared.router.weight", None, (1, hidden), tp.size > 1), tp)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.norm is None else self.norm(x)
        whole = enter_tensor_parallel(y, self.tp)
        s, b, h = whole.shape
        flat = whole.reshape(s * b, h)
        logits = F.linear(flat, self.router.weight)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        probs = logits.softmax(-1)
        weights, chosen = probs.topk(self.moe.top_k, dim=-1)
        if self.moe.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        kept = chosen if self.moe.capacity_factor is None else self._within_capacity(chosen, s)
        mixed = self._run_experts(flat, weights.to(flat.dtype), kept)
        if self.shared_gate_up is not None:
            mixed = mixed + self._run_shared(flat, self.shared_gate_up)
        out = leave_tensor_parallel(mixed.view(s, b, h), self.tp)
        has_loss = self.moe.aux_loss_coef > 0 or self.moe.z_loss_coef > 0
        if not (has_loss and torch.is_grad_enabled()):
            return out
        # Every tensor-parallel rank computes the same loss, and gradients of the router are summed over them.
        loss = self._losses(logits, probs, chosen, (s, b)) / (self.num_sparse_layers * self.tp.size)
        return with_loss(out, loss, self.auxiliary)

    # Rows of an expert differ from batch to batch, so that a compiled form would be made anew for each.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_experts(self, flat: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Send each token to its experts and add up what they make of it: (t, h), (t, k), (t, k) -> (t, h)."""
        num_experts, k = self.moe.num_experts, chosen.shape[1]
        assigned = chosen.flatten()
        order, inverse = sorting(assigned)
        counts = assigned.bincount(minlength=num_experts + 1).tolist()
        rows, beyond = dispatch(flat, order, inverse, k).split([sum(counts[:-1]), counts[-1]])
        made = self.experts(rows, counts[:-1])
        # Those beyond an expert's capacity come to nothing.
        done = torch.cat((made, torch.zeros_like(beyond))) * weights.flatten()[order].unsqueeze(1)
        return combine(done, order, inverse, k)

    def _run_shared(self, flat: Tensor, gate_up: "Matrix") -> Tensor:
        made = F.linear(activate(F.linear(flat, gate_up.weight), self.activation), self.shared_down.weight)
        return made * F.linear(flat, self.shared_router.weight).sigmoid()

    def _within_capacity(self, chosen: Tensor, length: int) -> Tensor:
        """Send the choices beyond each expert's capacity in a row nowhere, to expert number `num_experts`: (t, k)."""
        num_experts, k = self.moe.num_experts, chosen.shape[1]
        whole = length * self.context.size
        capacity = math.ceil(whole * k / num_experts * (self.moe.capacity_factor or 1.0))
        by_row = chosen.view(length, -1, k).transpose(0, 1).flatten(1)  # (b, s * k), in the order of tokens
        counted: Tensor = self._counted_over_context(F.one_hot(by_row, num_experts))
        before = counted.gather(2, by_row.unsqueeze(2)).squeeze(2) - 1
        sent = torch.where(before < capacity, by_row, num_experts)
        return sent.view(-1, length, k).transpose(0, 1).reshape(-1, k)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _counted_over_context(self, marks: Tensor) -> Tensor:
        """Count marks from the start of the whole row up to each place of this rank's part: (b, s * k, e)."""
        if self.context.size == 1:
            return marks.cumsum(1)
        chunks = torch.stack(marks.chunk(2, dim=1))  # (2, b, s * k / 2, e)
        totals = self.context.gather(chunks.sum(2), 0)  # (2 * size, b, e), in the order of the sequence
        earlier = self.context.cut(totals.cumsum(0) - totals, 0).unsqueeze(2)
        return torch.cat(tuple(chunks.cumsum(2) + earlier), dim=1)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _mean_over_context(self, share: Tensor) -> Tensor:
        if self.context.size > 1:
            dist.all_reduce(share, group=self.context.group)
            share /= self.context.size
        return share

    def _losses(self, logits: Tensor, probs: Tensor, chosen: Tensor, shape: tuple[int, int]) -> Tensor:
        """Weighted losses of this layer, summed over this rank's tokens: ().

        Load balance is Fedus et al. 2021 (arXiv:2101.03961, equations 4 to 6), for each row of a batch on its own
        and with choices counted as transformers counts them (even balance gives `top_k`); z-loss is Zoph et al.
        2022 (arXiv:2202.08906, equation 5).
        """
        s, b = shape
        num_experts = self.moe.num_experts
        share = F.one_hot(chosen, num_experts).sum(1).view(s, b, num_experts).to(probs.dtype).mean(0)
        share = self._mean_over_context(share)
        balance: Tensor = num_experts * (share * probs.view(s, b, num_experts).mean(0)).sum() * s
        loss = self.moe.aux_loss_coef * balance
        if self.moe.z_loss_coef > 0:
            loss = loss + self.moe.z_loss_coef * logits.logsumexp(-1).square().sum()
        return loss


class _WithLoss(torch.autograd.Function):
    """Passes activations on; in backward the loss joins the objective, which only the last stage computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, auxiliary: AuxiliaryLosses) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.auxiliary, ctx.is_counted = auxiliary, False
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        auxiliary: AuxiliaryLosses = ctx.auxiliary
        if not ctx.is_counted:  # a backward pass in two halves comes here twice
            ctx.is_counted = True
            auxiliary.total = loss.detach() if auxiliary.total is None else auxiliary.total + loss.detach()
        return grad, torch.full_like(loss, auxiliary.factor), None
