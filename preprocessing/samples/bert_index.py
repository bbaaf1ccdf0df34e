"""Builds the index of one part of a BERT dataset: `{split}_sentence_index.npy`, see `sentences.sentence_mapping`."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InputError
from preprocessing.config import IndexConfig
from preprocessing.samples.parts import Asked, Part
from preprocessing.samples.sample_index import save_array
from preprocessing.samples.sentences import LONG_SENTENCE, UNLIMITED, sentence_mapping


def build_sentence_part(
    split: str,
    bounds: tuple[float, float],
    part: Part,
    settings: IndexConfig,
    asked: Asked,
    folder: Path,
    warnings: list[str],
) -> dict[str, Any]:
    """Build one split of one part whose documents are rows of sentences; documents are split, never sentences.

    Raises:
        InputError: It gives no sample, and one is needed.
    """
    documents = part.documents(bounds, by=settings.split_by, seed=settings.seed)
    firsts, stops = part.sentences(documents)
    lengths = np.array(part.tokens.lengths)
    mapping = partial(
        sentence_mapping,
        *(firsts, stops, lengths),
        max_seq_length=settings.seq_length - 3,  # [CLS], [SEP], [SEP]
        short_seq_prob=settings.bert.short_seq_prob,
        seed=settings.seed,
        min_num_sent=2,
    )
    rows = mapping(num_epochs=1, max_num_samples=UNLIMITED)
    per_epoch = len(rows)
    num_samples = asked(per_epoch) if callable(asked) else asked
    where = f"{split} of {part.name}"
    if not per_epoch:
        text = (
            f"{where}: none of {len(documents)} documents has two sentences and none above {LONG_SENTENCE} tokens. "
            "Ingest with ingest.sentences, so that documents are divided into sentences"
        )
        if split == "train" or num_samples:
            raise InputError(f"{text}.")
        warnings.append(text)
    elif num_samples is not None and num_samples > per_epoch:
        rows = mapping(num_epochs=UNLIMITED, max_num_samples=num_samples)
        warnings.append(f"{where}: {per_epoch} samples an epoch; {num_samples} were asked for, so data repeat")
    if (left_out := _num_left_out(firsts, stops, lengths)) and per_epoch:
        warnings.append(
            f"{where}: {left_out} of {len(documents)} documents have fewer than two sentences or one above "
            f"{LONG_SENTENCE} tokens, and are left out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_array(folder / f"{split}_sentence_index.npy", [rows], rows.shape)
    return {
        "samples": len(rows),
        "documents": len(documents),
        "documents_left_out": left_out,
        "samples_per_epoch": per_epoch,
        **({"asked": num_samples} if callable(asked) else {}),
    }


def _num_left_out(firsts: Any, stops: Any, lengths: Any) -> int:
    is_long = np.concatenate([[0], np.cumsum(lengths > LONG_SENTENCE)])
    return int(((stops - firsts < 2) | (is_long[stops] > is_long[firsts])).sum())
