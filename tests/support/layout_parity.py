"""What every test of layouts does with the numbers of its ranks: join them, and hold them against one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from training_cases import relative_difference

Found = dict[str, tuple[list[Any], dict[str, Tensor]]]
"""Of each case: rows of numbers of its steps, and the whole gradient of every parameter."""


def joined(parts: Sequence[Found]) -> Found:
    """Join what ranks found: the same numbers from all of them, gradients from those that have the parameter."""
    whole: Found = {}
    for name in parts[0]:
        curves = [part[name][0] for part in parts]
        assert all(one == curves[0] for one in curves), f"{name}: ranks report different numbers"
        whole[name] = (curves[0], {key: gradient for part in parts for key, gradient in part[name][1].items()})
    return whole


def assert_equal(found: Found, reference: Found) -> None:
    """Hold losses and norms to 1e-12 (relative), gradients to 1e-10 (absolute)."""
    for name, (losses, gradients) in found.items():
        expected_losses, expected = reference[name]
        assert relative_difference(losses, expected_losses) < 1e-12, name
        assert gradients.keys() == expected.keys(), name
        for key, gradient in gradients.items():
            assert torch.allclose(gradient, expected[key], rtol=0, atol=1e-10), f"{name}: {key}"
