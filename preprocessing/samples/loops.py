"""The two loops of a blend in plain Python, as `kernels` runs them for few samples and `compiled` compiles them."""

from typing import Any

import numpy as np


def blend(weights: Any, dataset_index: Any, dataset_sample_index: Any) -> None:
    taken = np.zeros(len(weights), dtype=np.int64)
    for i in range(len(dataset_index)):
        factor = float(max(i, 1))
        chosen = 0
        largest = weights[0] * factor - taken[0]
        for d in range(1, len(weights)):
            deficit = weights[d] * factor - taken[d]
            if deficit > largest:
                chosen = d
                largest = deficit
        dataset_index[i] = chosen
        dataset_sample_index[i] = taken[chosen]
        taken[chosen] += 1


def blend_exhaustively(sizes: Any, weights: Any, dataset_index: Any, dataset_sample_index: Any) -> None:
    taken = np.zeros(len(weights), dtype=np.int64)
    for i in range(len(dataset_index)):
        factor = float(max(i, 1))
        chosen = -1
        largest = 0.0
        for d in range(len(weights)):
            if taken[d] < sizes[d]:
                deficit = weights[d] * factor - taken[d]
                if chosen < 0 or deficit > largest:
                    chosen = d
                    largest = deficit
        dataset_index[i] = chosen
        dataset_sample_index[i] = taken[chosen]
        taken[chosen] += 1
