"""What a causal model is told about a row of tokens besides the tokens: loss mask, positions, document bounds.

Bit-identical to Megatron-LM's GPTDataset (d98e8a64, gpt_dataset.py, `_get_ltor_masks_and_position_ids`
and `__getitem__`) for the same options.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PADDING = -1  # stands in rows for tokens that are not there


@dataclass(frozen=True)
class CausalBatch:
    """Rows ready for a causal model; all (rows, seq_length).

    Args:
        tokens, labels: int64; 0 where there is padding.
        loss_mask: float32, 1 where a loss is due.
        position_ids: int64, from 0; at each document anew if positions are reset.
        documents: int64, the number of the document in the row that each input token belongs to: a
            token attends to itself and to earlier tokens of the same number. None if attention
            crosses documents.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64] | None


def causal_batch(
    rows: npt.NDArray[np.int64],
    *,
    eod_id: int,
    resets_positions: bool = False,
    resets_attention: bool = False,
    masks_eod: bool = False,
) -> CausalBatch:
    """Split rows into inputs and labels and describe them.

    Args:
        rows: (rows, seq_length + 1) as `GPTSamples.tokens` gives them; PADDING where there is no token.
        eod_id: End-of-document token. It belongs to the document that it ends.
        resets_positions: Count positions from 0 after every EOD (reset_position_ids).
        resets_attention: Attention does not cross an EOD (reset_attention_mask).
        masks_eod: No loss where the input is EOD (eod_mask_loss): what follows is another document.
    """
    tokens, labels = rows[:, :-1], rows[:, 1:]
    is_eod = tokens == eod_id
    loss_mask = np.ones(tokens.shape, dtype=np.float32)
    if masks_eod:
        loss_mask[is_eod] = 0
    loss_mask[labels == PADDING] = 0
    position_ids = np.tile(np.arange(tokens.shape[1], dtype=np.int64), (len(tokens), 1))
    if resets_positions:
        position_ids -= _document_starts(is_eod)
    return CausalBatch(
        tokens=np.where(tokens == PADDING, 0, tokens),
        labels=np.where(labels == PADDING, 0, labels),
        loss_mask=loss_mask,
        position_ids=position_ids,
        documents=document_numbers(is_eod) if resets_attention else None,
    )


def document_numbers(is_eod: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Number the documents of each row: (rows, seq_length), from 0, one more after every EOD."""
    numbers = np.zeros(is_eod.shape, dtype=np.int64)
    np.cumsum(is_eod[:, :-1], axis=1, out=numbers[:, 1:])
    return numbers


def cumulative_lengths(documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the bounds of all documents of all rows, as variable-length attention kernels take them.

    Args:
        documents: (rows, seq_length) numbers of documents.

    Returns:
        (documents + 1,), int32: 0, the end of each document counted through the rows, rows x seq_length.
    """
    is_first = np.ones(documents.shape, dtype=bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return np.append(np.flatnonzero(is_first), documents.size).astype(np.int32)


def attention_mask(documents: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which positions may be seen: (rows, seq_length, seq_length), True where query i sees key j <= i.

    Megatron-LM stores the inverse. For tests and small models: `documents` says the same in one row.
    """
    length = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    return np.asarray(same & np.tri(length, dtype=bool))


def _document_starts(is_eod: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return where the document of each position begins: (rows, seq_length)."""
    starts = np.zeros(is_eod.shape, dtype=np.int64)
    starts[:, 1:] = np.where(is_eod[:, :-1], np.arange(1, is_eod.shape[1]), 0)
    return np.maximum.accumulate(starts, axis=1)
