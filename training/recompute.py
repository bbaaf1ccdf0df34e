"""Which activations of a block are kept for backward and which are computed again.

`none` keeps all; `full` keeps a block's input (Chen et al. 2016, arXiv:1604.06174); `selective`
keeps the results of matrix products and attention, and computes norms, activations and the rest again.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from training.config import Recompute as Recompute


def run_block(block: nn.Module, arguments: tuple[Any, ...], recompute: Recompute) -> Tensor:
    """Call `block` with `arguments`, keeping what `recompute` says."""
    if recompute == "none" or not torch.is_grad_enabled():
        out: Tensor = block(*arguments)
        return out
    # No layer draws random numbers (training/dropout.py), so there is no generator state to restore.
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    again: Tensor = checkpoint(block, *arguments, **settings)
    return again


_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_products(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
