"""Which sentences make a sample: the mappings of Megatron-LM's BERT, T5 and ICT datasets, bit for bit.

A document is a row of sentences, each a sequence of the dataset. Rules after Megatron-LM d98e8a64,
megatron/core/datasets/helpers.cpp, `build_mapping` and `build_blocks_mapping`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

LONG_SENTENCE = 512  # tokens; a document with a longer one is left out
UNLIMITED = 2**31 - 3  # samples or epochs, where only the other one is limited

Rows = npt.NDArray[np.unsignedinteger]
Bounds = npt.NDArray[np.int64]


def sentence_mapping(
    firsts: Bounds,
    stops: Bounds,
    sizes: npt.NDArray[np.int32],
    *,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_num_sent: int,
) -> Rows:
    """Return (samples, 3): first sentence, one past the last, target length in tokens.

    Sentences are added until there are as many tokens as the target says; with probability
    `short_seq_prob` the target is shorter, drawn evenly from 2 up (Devlin et al. 2019, arXiv 1810.04805,
    appendix A.2). Whole epochs are walked until there are `max_num_samples`; there may be more.

    Args:
        firsts, stops: (documents,) first sentence of each document, and one past its last.
        sizes: (sentences,) tokens of each sentence of the dataset.
        min_num_sent: Sentences that a sample needs: 2 for pairs.
    """
    from preprocessing.samples import compiled

    ratio = int(1 / short_seq_prob + 0.5) if short_seq_prob > 0 else 0
    dtype = _dtype(int(stops.max(initial=0)), max_seq_length)
    counted = np.empty((0, 3), dtype=dtype)
    for _ in range(2):  # counts, then fills
        key = _state(seed)
        count = compiled.sentence_rows(
            *(firsts, stops, sizes, num_epochs, max_num_samples, max_seq_length, np.uint32(ratio), key),
            *(min_num_sent, LONG_SENTENCE, counted),
        )
        if len(counted) == count:
            break
        counted = np.empty((count, 3), dtype=dtype)
    compiled.shuffle_rows(counted, seed + 1)
    return counted


def block_mapping(
    firsts: Bounds,
    stops: Bounds,
    sizes: npt.NDArray[np.int32],
    title_sizes: npt.NDArray[np.int32],
    *,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
    use_one_sent_blocks: bool,
) -> Rows:
    """Return (blocks, 4): first sentence, one past the last, document, number of the block in the epoch.

    For inverse cloze tasks (Lee, Chang and Toutanova 2019, arXiv 1906.00300): a block leaves room for
    the title of its document.

    Args:
        firsts, stops, title_sizes: (documents,).
        sizes: (sentences,) tokens.
    """
    from preprocessing.samples import compiled

    minimum = 1 if use_one_sent_blocks else 2
    dtype = _dtype(int(stops.max(initial=0)), len(firsts))
    counted = np.empty((0, 4), dtype=dtype)
    for _ in range(2):
        count = compiled.block_rows(
            *(firsts, stops, sizes, title_sizes, num_epochs, max_num_samples, max_seq_length),
            *(minimum, LONG_SENTENCE, counted),
        )
        if len(counted) == count:
            break
        counted = np.empty((count, 4), dtype=dtype)
    compiled.shuffle_rows(counted, seed + 1)
    return counted


def _state(seed: int) -> npt.NDArray[np.uint32]:
    """Return the 624 words of MT19937 seeded as in C++ and numpy."""
    state: Any = np.random.RandomState(seed).get_state(legacy=True)
    return np.array(state[1], dtype=np.uint32)


def _dtype(*highest: int) -> type[np.unsignedinteger]:
    return np.uint32 if max(highest) < 2**32 else np.uint64
