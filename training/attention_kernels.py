"""Attention of some queries to some keys, with what is needed to join it with attention to other keys.

In: queries, keys, values. Out: their outputs and the logarithm of each softmax's denominator. The backward pass takes
the denominators of *all* keys, so that gradients of a piece are exact parts of the whole. PyTorch's fused
kernels do the work: on the CPU always, on CUDA in 16 bits without a mask; plain products do the rest.
Letters: b batch, n heads, g key-value groups, q queries, k keys, d head width.
"""

import math

import torch
from torch import Tensor

_aten = torch.ops.aten


def is_fused(q_bnqd: Tensor, *, has_mask: bool) -> bool:
    """Say whether a kernel takes these queries without ever holding all scores."""
    if not q_bnqd.is_cuda:
        return True
    return not has_mask and q_bnqd.dtype in (torch.float16, torch.bfloat16)


def attend(
    q_bnqd: Tensor, k_bgkd: Tensor, v_bgkd: Tensor, mask: Tensor | None, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend to these keys alone.

    Args:
        mask: Which keys a query sees, bool, (1 or b, 1, q, k); a query may see none. None: all of them.
        is_causal: Query i sees keys 0 to i; goes without a mask.

    Returns:
        out: (b, n, q, d), in the dtype of `q_bnqd`; 0 for queries that see nothing.
        log_sum: (b, n, q), at least float32; -inf for queries that see nothing.
    """
    k_bnkd, v_bnkd = _for_each_head(q_bnqd, k_bgkd, v_bgkd)
    if not is_fused(q_bnqd, has_mask=mask is not None):
        return _plain(q_bnqd, k_bnkd, v_bnkd, mask, is_causal)
    if q_bnqd.is_cuda:
        out, log_sum, *_ = _aten._scaled_dot_product_flash_attention(q_bnqd, k_bnkd, v_bnkd, 0.0, is_causal)
        return out, log_sum
    bias = None if mask is None else _additive(mask, q_bnqd.dtype)
    out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(
        q_bnqd, k_bnkd, v_bnkd, 0.0, is_causal, attn_mask=bias
    )
    if mask is not None:  # the kernel says 0 where a query sees nothing
        log_sum = torch.where(mask.any(-1), log_sum, -math.inf)
    return out, log_sum


def attend_backward(
    grad: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    log_sum: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to queries and to these keys and values.

    Args:
        grad: Of the output over all keys: (b, n, q, d).
        qkv: As `attend` took them.
        out: Output over all keys.
        log_sum: Over all keys.

    Returns:
        Of the shapes of `qkv`.
    """
    q_bnqd, k_bgkd, v_bgkd = qkv
    k_bnkd, v_bnkd = _for_each_head(q_bnqd, k_bgkd, v_bgkd)
    if not is_fused(q_bnqd, has_mask=mask is not None):
        grads = _plain_backward(grad, (q_bnqd, k_bnkd, v_bnkd), out, log_sum, mask, is_causal)
    elif q_bnqd.is_cuda:
        none = torch.empty(0, dtype=torch.int64, device=q_bnqd.device)
        sizes = (q_bnqd.shape[2], k_bnkd.shape[2])
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad, q_bnqd, k_bnkd, v_bnkd, out, log_sum, none, none, *sizes, 0.0, is_causal, none, none
        )
    else:
        bias = None if mask is None else _additive(mask, q_bnqd.dtype)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q_bnqd, k_bnkd, v_bnkd, out, log_sum, 0.0, is_causal, attn_mask=bias
        )
    groups = k_bgkd.shape[1]
    return grads[0], _over_heads(grads[1], groups), _over_heads(grads[2], groups)


def _for_each_head(q_bnqd: Tensor, k_bgkd: Tensor, v_bgkd: Tensor) -> tuple[Tensor, Tensor]:
    repeats = q_bnqd.shape[1] // k_bgkd.shape[1]
    if repeats == 1:
        return k_bgkd, v_bgkd
    return k_bgkd.repeat_interleave(repeats, dim=1), v_bgkd.repeat_interleave(repeats, dim=1)


def _over_heads(grad_bnkd: Tensor, groups: int) -> Tensor:
    """Sum over the heads that share a key: (b, g, k, d)."""
    return grad_bnkd if grad_bnkd.shape[1] == groups else grad_bnkd.unflatten(1, (groups, -1)).sum(2)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, is_causal)
    log_sum = scores.logsumexp(-1)
    return (_probabilities(scores, log_sum) @ v.to(scores.dtype)).to(q.dtype), log_sum


def _plain_backward(
    grad: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, log_sum: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(qkv[0], qkv[1], mask, is_causal)
    exact = scores.dtype
    q, k, v = (x.to(exact) for x in qkv)
    grad, probs = grad.to(exact), _probabilities(scores, log_sum)
    both = (grad * out).sum(-1, keepdim=True)
    grad_scores = probs * (grad @ v.mT - both) / math.sqrt(q.shape[-1])
    return tuple(x.to(qkv[0].dtype) for x in (grad_scores @ k, grad_scores.mT @ q, probs.mT @ grad))  # type: ignore[return-value]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """(b, n, q, k), at least float32."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q.to(exact) @ k.to(exact).mT / math.sqrt(q.shape[-1])
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _probabilities(scores: Tensor, log_sum: Tensor) -> Tensor:
    return (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min).unsqueeze(-1)).exp()
