"""What a dataset or tokenizer on disk is, and whether it is whole. Reads only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.errors import ShardlineError
from preprocessing.dataset.documents import choose_documents, show_documents
from preprocessing.dataset.indexed_dataset import DTYPES, IndexedDataset
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.ingestion.document_table import DOCUMENTS
from preprocessing.reading.pile import compare_with_published, is_of_the_pile
from preprocessing.tokenization.loading import load_tokenizer, tokenizer_format

CHUNK_TOKENS = 2**24
SAMPLE_TOKENS = 32
SAMPLE_DOCUMENTS = 3


def inspect_dataset(path: str | Path) -> dict[str, Any]:
    """Describe a dataset artifact, a folder of pairs, or one foreign pair, as plain data.

    Raises:
        ConfigError: There is no dataset at `path`.
        InputError: It is damaged.
    """
    dataset = TokenDataset(path)
    codes = {dtype: code for code, dtype in DTYPES.items()}
    result: dict[str, Any] = {
        "shards": len(dataset.shards),
        "token_type": f"{dataset.dtype.name} (code {codes[dataset.dtype]})",
        "documents": dataset.num_documents,
        "sequences": dataset.num_sequences,
        "tokens": dataset.num_tokens,
        "vocab_size": dataset.vocab_size,
        "eod_id": dataset.eod_id,
        "longest_sequence": int(dataset.lengths.max(initial=0)),
        "pairs": [
            {"pair": shard.prefix.name, "documents": shard.num_documents, "tokens": shard.num_tokens}
            for shard in dataset.shards
        ],
    }
    if "subsets" in dataset.summary:
        result["subsets"] = [
            {"subset": name, **numbers, "bytes_per_token": numbers["bytes"] / max(1, numbers["tokens"])}
            for name, numbers in dataset.summary["subsets"].items()
        ]
    if is_of_the_pile(dataset.summary.get("subsets", {})):
        rows = compare_with_published(dataset.summary["subsets"])
        result["published"] = [{"subset": name, **row} for name, row in rows.items()]
    if found := [problem for shard in dataset.shards for problem in shard.problems()]:
        result["problems"] = found
    if dataset.num_sequences:
        result["sequence_lengths"] = length_histogram(dataset.lengths)
        result["samples"] = [
            {"document": item.document, "tokens": item.tokens, "ids": list(item.ids), "text": item.text}
            for item in show_documents(
                dataset, choose_documents(dataset, SAMPLE_DOCUMENTS, seed=0), max_tokens=SAMPLE_TOKENS
            )
        ]
    return result


def length_histogram(lengths: npt.NDArray[np.int32]) -> list[dict[str, int]]:
    """Count sequences and their tokens by length, in powers of two: [2^k, 2^(k+1)), and 0 by itself.

    Returns:
        Rows of `from`, `to` (both within the bin), `sequences` and `tokens`, without empty bins at either end.
    """
    counts = np.zeros(33, dtype=np.int64)
    tokens = np.zeros(33, dtype=np.int64)
    for start in range(0, len(lengths), CHUNK_TOKENS):
        chunk = np.array(lengths[start : start + CHUNK_TOKENS])
        # frexp gives the number of binary digits: 0 for 0, k + 1 for [2^k, 2^(k+1)).
        digits = np.frexp(chunk.astype(np.float64))[1]
        counts += np.bincount(digits, minlength=33)
        tokens += np.bincount(digits, weights=chunk, minlength=33).astype(np.int64)
    filled = np.flatnonzero(counts)
    return [
        {
            "from": 1 << (digits - 1) if digits else 0,
            "to": (1 << digits) - 1,
            "sequences": int(counts[digits]),
            "tokens": int(tokens[digits]),
        }
        for digits in range(int(filled[0]), int(filled[-1]) + 1)
    ]


def inspect_tokenizer(path: str | Path) -> dict[str, Any]:
    """Describe a tokenizer as plain data.

    Raises:
        ConfigError: There is none at `path`, or it cannot be read.
    """
    tokenizer = load_tokenizer(path)
    sample = "The quick brown fox, 1984: naïve café\n"
    ids = tokenizer.encode(sample)
    return {
        "format": tokenizer_format(path),
        "model": (tokenizer.data.get("model") or {}).get("type", "BPE"),
        "vocab_size": tokenizer.vocab_size,
        "token_type": tokenizer.token_dtype.name,
        "eod": _named(tokenizer.eod_id, tokenizer.token),
        "bos": _named(tokenizer.bos_id, tokenizer.token),
        "special_tokens": list(tokenizer.special_tokens),
        "sample": sample,
        "sample_ids": ids,
        "sample_survives": tokenizer.decode(ids) == sample,
    }


def _named(token_id: int | None, name: Any) -> str | None:
    return None if token_id is None else f"{name(token_id)} = {token_id}"


def verify_dataset(path: str | Path) -> list[str]:
    """Re-read a whole dataset and list what is damaged, one line for each thing; [] if it is whole.

    Looks at headers, pointers and sizes of each pair, every token id against the vocabulary, and
    `documents.parquet` against the pairs. Digests of files are compared by the caller, for all
    kinds of artifact alike.
    """
    try:
        dataset = TokenDataset(path)
    except ShardlineError as error:
        pairs = sorted(Path(path).glob("*.idx")) if Path(path).is_dir() else []
        found = [problem for pair in pairs for problem in verify_dataset(pair)] if len(pairs) > 1 else []
        return found or [str(error)]
    problems = []
    for shard in dataset.shards:
        problems += [*shard.problems(), *_bad_ids(shard, dataset.vocab_size)]
    if dataset.artifact is not None and not problems:  # a damaged index counts nothing
        problems += _count_differences(dataset)
    return problems


def _bad_ids(shard: IndexedDataset, vocab_size: int | None) -> Iterator[str]:
    """Find ids that no token has, a chunk at a time."""
    for start in range(0, shard.num_tokens, CHUNK_TOKENS):
        chunk = shard.tokens[start : start + CHUNK_TOKENS]
        is_bad = chunk < 0
        if vocab_size is not None:
            is_bad |= chunk >= vocab_size
        if is_bad.any():
            first = start + int(is_bad.argmax())
            sequence = int(np.searchsorted(np.cumsum(shard.lengths, dtype=np.int64), first, side="right"))
            yield (
                f"{shard.bin_path}: token {first} (sequence {sequence}) is {int(shard.tokens[first])}, "
                f"outside the vocabulary of {vocab_size}"
            )
            return


def _count_differences(dataset: TokenDataset) -> Iterator[str]:
    """Compare the pairs with the manifest and with `documents.parquet`."""
    import pyarrow.parquet as pq

    for name, found in (("documents", dataset.num_documents), ("tokens", dataset.num_tokens)):
        wanted = dataset.summary.get(name)
        if wanted != found:
            yield f"{dataset.path}: its manifest says {wanted} {name}, the shards hold {found}"
    if dataset.summary.get("has_document_table") is False:  # made of pairs that have none
        return
    path = dataset.path / DOCUMENTS
    try:
        tokens = pq.read_table(path, columns=["tokens"]).column("tokens").to_numpy()
    except Exception as error:  # pyarrow raises its own and builtin types for damaged files
        yield f"{path}: cannot be read ({error})"
        return
    lengths = dataset.document_lengths
    if len(tokens) != len(lengths):
        yield f"{path}: has {len(tokens)} rows for {len(lengths)} documents"
    elif (tokens != lengths).any():
        first = int((tokens != lengths).argmax())
        yield f"{path}: says {tokens[first]} tokens of document {first}, the shards hold {lengths[first]}"
