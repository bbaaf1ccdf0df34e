"""Casts count what is lost."""

import math

import torch

from conversion.casting import Caster
from conversion.catalogue import equal_bits


def test_finite_values_that_become_infinite_are_counted_by_tensor():
    caster = Caster(torch.float16)

    cast = caster("w", torch.tensor([1.0, 1e6, -1e6, math.inf, math.nan]))

    assert cast.dtype == torch.float16
    assert caster.overflows == {"w": 2} and caster.elements == 5


def test_moments_and_kept_types_are_passed_through():
    moment = torch.ones(2)

    assert Caster(torch.bfloat16)("optim.w.exp_avg", moment) is moment
    assert Caster(None)("w", moment) is moment


def test_bits_are_compared_and_not_values():
    assert equal_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not equal_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
