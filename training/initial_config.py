"""Where a run's first weights come from, when not from the seed. Never imports torch."""

from typing import Self

from pydantic import NonNegativeInt, model_validator

from contracts.configuration import Settings, added, execution


class InitialConfig(Settings):
    """Weights, and what else is wanted, of a checkpoint that the run begins with."""

    checkpoint: str = execution(
        "", description="Native checkpoint, as an artifact, a run or a step folder. Empty: random weights of the seed."
    )
    step: NonNegativeInt | None = added(None, description="Step to take of it. Default: its newest.")
    averaged: bool = added(False, description="Begin with the moving average of its weights.")
    optimizer: bool = added(False, description="Take over the optimizer's state and its count of updates too.")
    position: bool = added(
        False, description="Go on at its step: in the data, in the schedule and in the count. Needs optimizer: true."
    )
    other_data: bool = added(
        False,
        description="With position: go on though the data are not those that it has read so far; what it has not read "
        "of them may come again or be left out. It is recorded with the run.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.position and not self.optimizer:
            raise ValueError("position: true goes on with the schedule in mid-course, which needs optimizer: true.")
        if self.position and self.averaged:
            raise ValueError("averaged: true begins anew from averaged weights; it does not go with position: true.")
        if self.other_data and not self.position:
            raise ValueError("other_data: true says something about position: true only. Leave it out.")
        return self
