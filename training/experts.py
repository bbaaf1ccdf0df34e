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
from training.mesh import TensorParallel
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
    """Router and experts, with the norm before them; (s, b, h) or (s/tp, b, h) -> the same.

    Expert parallelism would deal the experts (`gate_up`, `down`) to ranks and exchange rows around
    `_run_experts`; nothing else would change.
    """

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
    ) -> None:
        super().__init__()
        if model.moe is None:
            raise ValueError("model.moe is not set")
        self.moe: MoeConfig = model.moe
        self.tp, self.activation, self.auxiliary, self.context = tp, model.activation, auxiliary, context
        self.num_sparse_layers = sum(model.has_experts(n) for n in range(model.num_layers))
        hidden, name = model.hidden_size, f"{layer}.mlp"
        self.norm = backend.norm(f"{name}.norm") if has_norm else None
        self.router = _Matrix(ParamSpec(f"{name}.router.weight", None, (self.moe.num_experts, hidden), tp.size > 1), tp)
        experts = [f"{name}.experts.{n}" for n in range(self.moe.num_experts)]
        width, has_gate = model.expert_ffn_hidden_size, model.is_gated
        self.gate_up, self.down = _pair(experts, (hidden, width), tp, has_gate=has_gate)
        self.shared_gate_up: _Matrix | None = None
        if shared := self.moe.shared_ffn_hidden_size:
            self.shared_gate_up, self.shared_down = _pair([f"{name}.shared"], (hidden, shared), tp, has_gate=has_gate)
            self.shared_router = _Matrix(ParamSpec(f"{name}.shared.router.weight", None, (1, hidden), tp.size > 1), tp)

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
        order = assigned.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = assigned.bincount(minlength=num_experts + 1).tolist()
        rows: Tensor = _Dispatch.apply(flat, order, inverse, k)
        parts = rows.split(counts)
        # `unbind` has one gradient for all experts; indexing would make a whole one for each.
        gate_up = self.gate_up.weight.view(num_experts, -1, flat.shape[1]).unbind()
        down = self.down.weight.view(num_experts, flat.shape[1], -1).unbind()
        made = [
            F.linear(activate(F.linear(part, first), self.activation), second)
            for part, first, second in zip(parts, gate_up, down, strict=False)
        ]
        made.append(torch.zeros_like(parts[-1]))  # those beyond an expert's capacity
        done = torch.cat(made) * weights.flatten()[order].unsqueeze(1)
        return _Combine.apply(done, order, inverse, k)  # type: ignore[no-any-return]

    def _run_shared(self, flat: Tensor, gate_up: "_Matrix") -> Tensor:
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


class _Matrix(nn.Module):
    """This rank's part of a matrix."""

    def __init__(self, spec: ParamSpec, tp: TensorParallel) -> None:
        super().__init__()
        shape = list(spec.global_shape)
        if spec.tp_dim is not None:
            shape[spec.tp_dim] //= tp.size
        self.weight = nn.Parameter(torch.empty(shape))
        self.specs = {"weight": spec}


def _pair(names: list[str], sizes: tuple[int, int], tp: TensorParallel, *, has_gate: bool) -> tuple[_Matrix, _Matrix]:
    """Matrices into and out of the inner width of several experts, fused by rows.

    Args:
        names: Canonical name of each expert.
        sizes: (hidden, inner width).
    """
    hidden, width = sizes
    into = tuple(f"{name}.{part}.weight" for name in names for part in (("gate", "up") if has_gate else ("up",)))
    out = tuple(f"{name}.down.weight" for name in names)
    prefix = names[0].rpartition(".")[0] if len(names) > 1 else names[0]
    first = ParamSpec(f"{prefix}.gate_up.weight", 0, (len(into) * width, hidden), blocks=into)
    second = ParamSpec(f"{prefix}.down.weight", 1, (len(out) * hidden, width), blocks=out if len(out) > 1 else ())
    if len(into) == 1:
        first = ParamSpec(into[0], 0, (width, hidden))
    return _Matrix(first, tp), _Matrix(second, tp)


class _Dispatch(torch.autograd.Function):
    """A copy of each token for each of its experts, in the order of experts; gradients add up without scattering."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return flat[order.div(k, rounding_mode="floor")]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].view(-1, ctx.k, grad.shape[1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """The sum of what its experts made of each token: the transpose of `_Dispatch`."""

    @staticmethod
    def forward(ctx: Any, done: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return done[inverse].view(-1, k, done.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order.div(ctx.k, rounding_mode="floor")], None, None, None


class _WithLoss(torch.autograd.Function):
    """Passes activations on; in backward the loss joins the objective, which only the last stage computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, auxiliary: AuxiliaryLosses) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.auxiliary = auxiliary
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        auxiliary: AuxiliaryLosses = ctx.auxiliary
        auxiliary.total = loss.detach() if auxiliary.total is None else auxiliary.total + loss.detach()
        return grad, torch.full_like(loss, auxiliary.factor), None
