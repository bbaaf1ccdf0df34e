"""The loops of `kernels`, compiled by numba. Importing this costs about a second."""

from typing import Any

import numpy as np
from numba import njit

from preprocessing.samples import loops

DRAWN_AHEAD = 1024

# No fastmath: a fused multiply-add would decide near ties of a blend the other way.
blend = njit(cache=True)(loops.blend)
blend_exhaustively = njit(cache=True)(loops.blend_exhaustively)


@njit(cache=True)
def _temper(key: Any, out: Any) -> None:
    for n in range(624):
        y = key[n]
        y ^= y >> np.uint32(11)
        y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
        y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
        out[n] = y ^ (y >> np.uint32(18))


@njit(cache=True)
def _refill(key: Any, out: Any) -> None:
    """Advance the 624 words of MT19937's state and temper them into `out` (Matsumoto and Nishimura 1998)."""
    upper, lower, matrix = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
    one, zero = np.uint32(1), np.uint32(0)
    for n in range(227):
        y = (key[n] & upper) | (key[n + 1] & lower)
        key[n] = key[n + 397] ^ (y >> one) ^ (matrix if y & one else zero)
    for n in range(227, 623):
        y = (key[n] & upper) | (key[n + 1] & lower)
        key[n] = key[n - 227] ^ (y >> one) ^ (matrix if y & one else zero)
    y = (key[623] & upper) | (key[0] & lower)
    key[623] = key[396] ^ (y >> one) ^ (matrix if y & one else zero)
    _temper(key, out)


@njit(cache=True)
def shuffle(array: Any, key: Any, position: Any) -> Any:
    """Fisher-Yates with masked rejection on MT19937's 32-bit outputs (numpy legacy `shuffle`).

    Partners are drawn for many places before any is swapped: a refused draw then costs no mispredicted
    branch, and the swaps, which miss the cache, do not wait for each other.
    """
    words = np.empty(624, dtype=np.uint32)
    _temper(key, words)
    partners = np.empty(DRAWN_AHEAD, dtype=np.int64)
    i: Any = len(array) - 1
    while i > 0:
        mask = i
        for shift in (1, 2, 4, 8, 16):
            mask |= mask >> shift
        # The mask stays the same down to half of it.
        count = min(DRAWN_AHEAD, i - (mask >> 1))
        drawn = 0
        while drawn < count:
            if position == 624:
                _refill(key, words)
                position = 0
            partner = np.int64(words[position]) & mask
            position += 1
            partners[drawn] = partner
            drawn += partner <= i - drawn
        for n in range(count):
            here, there = array[i - n], array[partners[n]]
            array[i - n] = there
            array[partners[n]] = here
        i -= count
    return position


@njit(cache=True)
def starts(lengths: Any, document_index: Any, seq_length: int, extra: int, state: Any, result: Any) -> None:
    """Fill rows of the sample index, going on at `state`: sample, position, tokens before it.

    Lengths are gathered ahead, since each lies at a random place of memory.
    """
    sample, position, before = state[0], state[1], state[2]
    last = len(document_index) - 1
    ahead = np.empty(DRAWN_AHEAD, dtype=np.int64)
    ahead_start, ahead_stop = position, position
    row = 0
    while row < len(result):
        target = sample * seq_length
        if position == ahead_stop and position <= last:
            ahead_start, ahead_stop = position, min(position + DRAWN_AHEAD, last + 1)
            for n in range(ahead_stop - ahead_start):
                ahead[n] = lengths[document_index[ahead_start + n]]
        length = ahead[position - ahead_start]
        if position < last and before + length < target + extra:
            before += length
            position += 1
        else:
            result[row, 0] = position
            result[row, 1] = target - before
            row += 1
            sample += 1
    state[0], state[1], state[2] = sample, position, before
