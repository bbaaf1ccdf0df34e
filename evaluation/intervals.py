"""Error bars: how far a number could be off because other documents might have been held out."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def bootstrap_ratio(
    numerators: Floats, denominators: Floats, *, resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of sum(numerators) / sum(denominators) over resampled documents.

    A document is drawn whole, since its tokens are not independent (Efron & Tibshirani 1993, ch. 13).

    Args:
        numerators: (documents,) such as nats.
        denominators: (documents,) such as bytes; the sum of any resample is positive.

    Returns:
        Lower and upper bound; both are the ratio itself for a single document.
    """
    count = len(numerators)
    generator = np.random.default_rng(seed)
    ratios = np.empty(resamples)
    for n in range(resamples):
        # Multiplicities instead of indices: one pass over memory, and no gather.
        weights = np.bincount(generator.integers(0, count, count), minlength=count)
        ratios[n] = (numerators @ weights) / (denominators @ weights)
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(ratios, [tail, 1.0 - tail])
    return float(low), float(high)
