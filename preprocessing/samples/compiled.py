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


@njit(cache=True)
def _has_long(sizes: Any, first: Any, stop: Any, limit: Any) -> Any:
    longest = 0
    for sentence in range(first, stop):
        longest = max(longest, sizes[sentence])
    return longest > limit


@njit(cache=True)
def _target(draw: Any, short_ratio: Any, max_seq_length: Any) -> Any:
    if draw % short_ratio == 0:
        return 2 + draw % (max_seq_length - 1)
    return max_seq_length


@njit(cache=True)
def _refill_64(state: Any) -> None:
    upper, lower = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
    for n in range(312):
        x = (state[n] & upper) | (state[(n + 1) % 312] & lower)
        mixed = state[(n + 156) % 312] ^ (x >> np.uint64(1))
        state[n] = mixed ^ np.uint64(0xB5026F5AA96619E9) if x & np.uint64(1) else mixed


@njit(cache=True)
def sentence_rows(
    firsts: Any,
    stops: Any,
    sizes: Any,
    num_epochs: Any,
    max_rows: Any,
    max_seq_length: Any,
    short_ratio: Any,
    key: Any,
    min_sentences: Any,
    long_sentence: Any,
    rows: Any,
) -> Any:
    """Fill the rows of `sentences.sentence_mapping`; count them where `rows` is empty."""
    words = np.empty(624, dtype=np.uint32)
    _temper(key, words)
    position = 624
    count = 0
    for _ in range(num_epochs):
        if count >= max_rows:
            break
        for document in range(len(firsts)):
            first, stop = firsts[document], stops[document]
            left = stop - first
            if left < min_sentences or (left > 1 and _has_long(sizes, first, stop, long_sentence)):
                continue
            target = max_seq_length
            if short_ratio:
                if position == 624:
                    _refill(key, words)
                    position = 0
                target = _target(words[position], short_ratio, max_seq_length)
                position += 1
            start, length, taken = first, 0, 0
            for sentence in range(first, stop):
                length += sizes[sentence]
                taken += 1
                left -= 1
                if (length >= target and left > 1 and taken >= min_sentences) or left == 0:
                    if len(rows):
                        rows[count, 0] = start
                        rows[count, 1] = sentence + 1
                        rows[count, 2] = target
                    count += 1
                    start, length, taken = sentence + 1, 0, 0
                    target = max_seq_length
                    if short_ratio:
                        if position == 624:
                            _refill(key, words)
                            position = 0
                        target = _target(words[position], short_ratio, max_seq_length)
                        position += 1
    return count


@njit(cache=True)
def block_rows(
    firsts: Any,
    stops: Any,
    sizes: Any,
    title_sizes: Any,
    num_epochs: Any,
    max_rows: Any,
    max_seq_length: Any,
    min_sentences: Any,
    long_sentence: Any,
    rows: Any,
) -> Any:
    """Fill the rows of `sentences.block_mapping`; count them where `rows` is empty."""
    count = 0
    for _ in range(num_epochs):
        if count >= max_rows:
            break
        block = 0
        for document in range(len(firsts)):
            first, stop = firsts[document], stops[document]
            left = stop - first
            if left < min_sentences or _has_long(sizes, first, stop, long_sentence):
                continue
            target = max_seq_length - title_sizes[document]
            start, length, taken = first, 0, 0
            for sentence in range(first, stop):
                length += sizes[sentence]
                taken += 1
                left -= 1
                if (length >= target and left >= min_sentences and taken >= min_sentences) or left == 0:
                    if len(rows):
                        rows[count, 0] = start
                        rows[count, 1] = sentence + 1
                        rows[count, 2] = document
                        rows[count, 3] = block
                    count += 1
                    block += 1
                    start, length, taken = sentence + 1, 0, 0
    return count


@njit(cache=True)
def shuffle_rows(rows: Any, seed: Any) -> None:
    """Swap row i with row (next 64-bit output of MT19937-64 mod i + 1), from the last i down (Nishimura 2000)."""
    state = np.empty(312, dtype=np.uint64)
    state[0] = np.uint64(seed)
    for n in range(1, 312):
        before = state[n - 1]
        state[n] = np.uint64(6364136223846793005) * (before ^ (before >> np.uint64(62))) + np.uint64(n)
    position = 312
    kept = np.empty(rows.shape[1], dtype=rows.dtype)
    for i in range(len(rows) - 1, 0, -1):
        if position == 312:
            _refill_64(state)
            position = 0
        x = state[position]
        position += 1
        x ^= (x >> np.uint64(29)) & np.uint64(0x5555555555555555)
        x ^= (x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        x ^= (x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        x ^= x >> np.uint64(43)
        j = np.int64(x % np.uint64(i + 1))
        for column in range(rows.shape[1]):
            kept[column] = rows[i, column]
            rows[i, column] = rows[j, column]
            rows[j, column] = kept[column]
