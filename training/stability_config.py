"""Settings of what a run does when its numbers go wrong: fp16's loss scale, values that are not finite, spikes.

Nothing here imports torch.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from contracts.configuration import Settings

Policy = Literal["stop", "skip", "roll_back"]
SpikePolicy = Literal["ignore", "stop", "skip", "roll_back"]


class LossScaleConfig(Settings):
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2)."""

    habits: ClassVar[Mapping[str, str]] = {
        "initial_loss_scale": "initial",
        "min_loss_scale": "smallest",
        "loss_scale_window": "window",
    }

    initial: float = Field(65536.0, gt=0, description="Scale at the start; a power of two loses no bits.")
    smallest: float = Field(1.0, gt=0, description="The scale never falls below it; an overflow there is no overflow.")
    window: PositiveInt = Field(1000, description="Updates in a row without overflow after which the scale doubles.")
    hysteresis: PositiveInt = Field(2, description="Overflows within a window that are borne before the scale halves.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.smallest > self.initial:
            raise ValueError(f"smallest ({self.smallest}) is above initial ({self.initial}). The scale starts there.")
        return self


class StabilityConfig(Settings):
    """What happens at a step whose loss or gradient is not finite, or far above the steps before."""

    on_nonfinite: Policy = Field(
        "stop",
        description="A loss or gradient that is not finite: stop the run, skip the update, or roll_back the weights "
        "to the last checkpoint and go on with the next samples.",
    )
    on_spike: SpikePolicy = Field("ignore", description="The same for a spike of the loss or the gradient norm.")
    spike_sigma: float = Field(
        6.0, gt=0, description="A spike is more standard deviations than this above the mean of the window."
    )
    spike_window: PositiveInt = Field(128, ge=8, description="Updates that mean and deviation are taken of.")
    max_in_a_row: PositiveInt = Field(10, description="Steps in a row without an update that stop the run.")

    @property
    def rolls_back(self) -> bool:
        return "roll_back" in (self.on_nonfinite, self.on_spike)
