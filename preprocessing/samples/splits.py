"""Split strings such as "969,30,1": the shares of train, valid and test, by position in a dataset."""

import itertools
import math
import re

SPLITS = ("train", "valid", "test")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")

Bounds = tuple[float, float] | None


def parse_split(text: str) -> tuple[Bounds, Bounds, Bounds]:
    """Return lower and upper bound in [0, 1] of train, valid and test; None for a split of no width.

    Normalised as in Megatron-LM (`parse_and_normalize_split` and the split matrix): missing
    weights are 0, all are divided by their sum, bounds are running sums in float64. Texts that
    Megatron-LM misreads (it takes any run of digits, so "-1,1,0" is 50/50) are errors here.

    Raises:
        ValueError: The text is no list of one to three weights; the message quotes it.
    """
    fields = [field.strip() for field in text.split(",")]
    if not text.strip():
        raise ValueError(f"split {text!r} is empty; write weights of train, valid and test, such as 99,1,0.")
    if len(fields) > len(SPLITS):
        raise ValueError(f"split {text!r} has {len(fields)} weights; it takes at most three: train, valid, test.")
    for field in fields:
        if field.startswith("-") and _NUMBER.fullmatch(field[1:]):
            raise ValueError(f"split {text!r} has the negative weight {field}; weights are 0 or more.")
        if not _NUMBER.fullmatch(field):
            raise ValueError(f"split {text!r}: {field!r} is not a plain number; write weights such as 99,1,0.")
    weights = [float(field) for field in fields] + [0.0] * (len(SPLITS) - len(fields))
    total = math.fsum(weights) if not any(math.isinf(weight) for weight in weights) else math.inf
    if total == 0 or math.isinf(total):
        raise ValueError(f"split {text!r}: its weights sum to {total:g}; at least one must be above 0 and all finite.")
    total = sum(weights)
    bounds = [0.0]
    for weight in weights:
        bounds.append(bounds[-1] + weight / total)
    train, valid, test = ((low, high) if high > low else None for low, high in itertools.pairwise(bounds))
    return train, valid, test


def split_range(bounds: Bounds, num_units: int) -> range:
    """Return the units (sequences) of a split: from round(lower x N) up to round(upper x N), half to even."""
    if bounds is None:
        return range(0)
    return range(round(bounds[0] * num_units), round(bounds[1] * num_units))
