"""Builds the index of one part of a dataset of conversations: which documents share a row, in which order.

Writes, per split, `{split}_document_index.npy`, the documents of all epochs in the order they are read, and
`{split}_row_index.npy`, (rows + 1,), where each row begins in it. Each epoch has an order of its own.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.errors import InputError
from preprocessing.config import IndexConfig
from preprocessing.samples.parts import Asked, Part
from preprocessing.samples.sample_index import save_array

Array = npt.NDArray[np.int64]


def build_conversation_part(
    split: str,
    bounds: tuple[float, float],
    part: Part,
    settings: IndexConfig,
    asked: Asked,
    folder: Path,
    warnings: list[str],
) -> dict[str, Any]:
    """Build one split of one part whose documents are turns, read and said.

    A conversation that is longer than a row is cut at its end; one of which nothing that is said is left then, is
    left out. Both are counted.

    Raises:
        InputError: A document has an odd number of sequences, or there is no row, and one is needed.
    """
    documents = part.documents(bounds, by=settings.split_by, seed=settings.seed)
    firsts, stops = part.sentences(documents)
    where = f"{split} of {part.name}"
    odd = np.flatnonzero((stops - firsts) % 2 == 1)
    if len(odd):
        raise InputError(
            f"{where}: document {documents[odd[0]]} has {(stops - firsts)[odd[0]]} sequences; conversations have two "
            "for each exchange, what is read and what is said. Ingest them with ingest.turns (--prompt, --response)."
        )
    starts = np.concatenate([[0], np.cumsum(part.tokens.lengths, dtype=np.int64)])
    lengths = starts[stops] - starts[firsts]
    read_first = part.tokens.lengths[firsts].astype(np.int64) if len(firsts) else lengths
    is_usable = read_first <= settings.seq_length  # at least one token that is said has a place
    usable, sizes = documents[is_usable], np.minimum(lengths[is_usable] - 1, settings.seq_length)
    num_cut, num_left_out = int((lengths[is_usable] - 1 > settings.seq_length).sum()), int((~is_usable).sum())
    order, rows = _rows(sizes, settings, epochs=1)
    per_epoch = len(rows) - 1
    num_samples = asked(per_epoch) if callable(asked) else asked
    if not per_epoch and (split == "train" or num_samples):
        raise InputError(f"{where}: none of {len(documents)} conversations fits seq_length {settings.seq_length}.")
    epochs = 1
    if num_samples is not None and num_samples > per_epoch:
        # Rows of an epoch differ by its order: build until there are enough.
        epochs = -(-num_samples // per_epoch)
        order, rows = _rows(sizes, settings, epochs=epochs)
        while len(rows) - 1 < num_samples:
            epochs += 1
            order, rows = _rows(sizes, settings, epochs=epochs)
        warnings.append(f"{where}: about {per_epoch} rows an epoch; {num_samples} were asked for, so data repeat")
    if num_samples is not None:
        rows = rows[: num_samples + 1]
        order = order[: rows[-1]]
    if num_cut or num_left_out:
        warnings.append(
            f"{where}: of {len(documents)} conversations {num_cut} are cut at seq_length {settings.seq_length}, and "
            f"{num_left_out} are left out, whose first prompt fills it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_array(folder / f"{split}_document_index.npy", [usable[order]], order.shape)
    save_array(folder / f"{split}_row_index.npy", [rows], rows.shape)
    return {
        "samples": len(rows) - 1,
        "epochs": epochs,
        "documents": len(documents),
        "documents_cut": num_cut,
        "documents_left_out": num_left_out,
        "samples_per_epoch": per_epoch,
        **({"asked": num_samples} if callable(asked) else {}),
    }


def _rows(sizes: Array, settings: IndexConfig, *, epochs: int) -> tuple[Array, Array]:
    """Order the conversations of so many epochs and put them into rows, each as long as the next one fits."""
    orders, rows, done = [], [np.zeros(1, dtype=np.int64)], 0
    for epoch in range(epochs):
        order = np.random.default_rng((settings.seed, epoch)).permutation(len(sizes))
        ends = _row_ends(sizes[order], settings.seq_length, packs=settings.sft.packs)
        orders.append(order)
        rows.append(ends + done)
        done += len(order)
    return np.concatenate(orders), np.concatenate(rows)


def _row_ends(sizes: Array, length: int, *, packs: bool) -> Array:
    if not packs:
        return np.arange(1, len(sizes) + 1)
    totals = np.cumsum(sizes)
    ends: list[int] = []
    begin, used = 0, 0
    while begin < len(sizes):
        begin = int(np.searchsorted(totals, used + length, side="right"))
        used = int(totals[begin - 1])
        ends.append(begin)
    return np.array(ends, dtype=np.int64)
