"""A run in phases: mixtures and row lengths that change on the way, without repeating or losing a sample.

The index holds samples of the run's `seq_length`, the longest. A phase with rows of a p-th of it takes a global
batch of samples at a time and trains on their first parts, then on their second, and so on, for p steps; then it
takes the next. So every position of the run follows from the number of rows used before it, and a phase uses up
the samples that it began. Never imports torch.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from pydantic import Field, PositiveInt

from contracts.configuration import Settings


class PhaseConfig(Settings):
    """A stretch of a run."""

    steps: PositiveInt | None = Field(None, description="Optimizer steps of this phase. The last one takes the rest.")
    seq_length: PositiveInt | None = Field(
        None, description="Tokens of a row in this phase; a whole part of the run's seq_length. Empty: all of it."
    )
    dataset_weights: tuple[float, ...] | None = Field(
        None,
        description="Share of each dataset in this phase. Empty: the run's dataset_weights, which must be set "
        "if another phase has some.",
    )


@dataclass(frozen=True)
class Phase:
    """A phase in numbers.

    Args:
        first_row: Rows that the run uses before it.
        num_rows: Rows that it uses.
        parts: Rows that a sample of the index gives.
        first_sample: Samples that the run uses before it.
        seq_length: Tokens of a row.
        weights: Share of each dataset; None where there are none.
    """

    first_row: int
    num_rows: int
    parts: int
    first_sample: int
    seq_length: int
    weights: tuple[float, ...] | None

    @property
    def num_samples(self) -> int:
        """Samples of the index that it uses."""
        return self.num_rows // self.parts


class _Run(Protocol):
    """What a curriculum reads of a run's settings."""

    @property
    def seq_length(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def train_steps(self) -> int: ...
    @property
    def phases(self) -> tuple[PhaseConfig, ...]: ...
    @property
    def dataset_weights(self) -> tuple[float, ...] | None: ...

    def samples_after(self, step: int) -> int: ...


class Curriculum:
    """The phases of a run; one where its settings name none.

    Raises:
        ValueError: They do not fit together; has the numbers.
    """

    def __init__(self, run: _Run) -> None:
        self.rows_per_step = run.global_batch_size
        self.phases: list[Phase] = []
        step = sample = 0
        given = run.phases or (PhaseConfig(),)
        for number, phase in enumerate(given, 1):
            where = f"phase {number} of phases"
            is_last = number == len(given)
            if phase.steps is None and not is_last:
                raise ValueError(f"{where} has no `steps`; only the last one takes the rest of the run.")
            stop = run.train_steps if is_last else step + (phase.steps or 0)
            if stop <= step or stop > run.train_steps or (is_last and phase.steps not in (None, stop - step)):
                raise ValueError(
                    f"{where}: the phases have {sum(item.steps or 0 for item in given)} steps, and train_steps is "
                    f"{run.train_steps}. Leave out `steps` of the last one, or change a number."
                )
            parts = _parts(where, run.seq_length, phase.seq_length, stop - step)
            first, end = run.samples_after(step), run.samples_after(stop)
            weights = phase.dataset_weights or run.dataset_weights
            made = Phase(first, end - first, parts, sample, run.seq_length // parts, weights)
            self.phases.append(made)
            step, sample = stop, sample + made.num_samples
        if len({item.weights is None for item in self.phases}) > 1:
            bare = next(n for n, item in enumerate(self.phases, 1) if item.weights is None)
            raise ValueError(
                f"phase {bare} of phases has no dataset_weights, and others have. Give it some, or set the run's "
                "dataset_weights, which then hold for it."
            )
        self._starts = [phase.first_row for phase in self.phases]

    @property
    def num_samples(self) -> int:
        """Samples of the index that the whole run uses."""
        return self.phases[-1].first_sample + self.phases[-1].num_samples

    @property
    def mixtures(self) -> list[tuple[int, tuple[float, ...]]]:
        """Samples and weights of each phase; empty where nothing is weighted."""
        return [(phase.num_samples, phase.weights) for phase in self.phases if phase.weights is not None]

    def phase_at(self, row: int) -> Phase:
        """Return the phase that trains on a row; the last one's goes on for ever."""
        return self.phases[bisect_right(self._starts, row) - 1]

    def place(self, row: int) -> tuple[int, int]:
        """Return the sample of the index that a row is of, and which of its parts."""
        phase = self.phase_at(row)
        if phase.parts == 1:
            return phase.first_sample + row - phase.first_row, 0
        step, number = divmod(row - phase.first_row, self.rows_per_step)
        block, part = divmod(step, phase.parts)
        return phase.first_sample + block * self.rows_per_step + number, part

    def tokens_after(self, rows: int) -> int:
        """Tokens of the first `rows` rows."""
        starts = [*self._starts[1:], None]
        counted = zip(self.phases, starts, strict=True)
        return sum(
            max(0, min(rows, rows if stop is None else stop) - phase.first_row) * phase.seq_length
            for phase, stop in counted
        )


def _parts(where: str, longest: int, length: int | None, steps: int) -> int:
    """Rows that a sample of `longest` tokens gives in a phase.

    Raises:
        ValueError: The sample, or the steps of the phase, are not a multiple.
    """
    length = length or longest
    if longest % length:
        whole = [longest // n for n in range(1, longest + 1) if longest % n == 0]
        above = min(size for size in whole if size > min(length, longest - 1))
        below = max((size for size in whole if size < length), default=above)
        raise ValueError(
            f"{where}: seq_length ({length}) is no whole part of the run's ({longest}). Nearest: {below} or {above}."
        )
    parts = longest // length
    if steps % parts:
        below = steps // parts * parts
        nearest = f"{below} or {below + parts}" if below else str(parts)
        raise ValueError(
            f"{where}: {steps} steps with rows of {length} tokens, {parts} of which make one sample of {longest}, "
            f"would leave parts of samples unread. Use {nearest} steps."
        )
    return parts
