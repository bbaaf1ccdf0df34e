"""The optional engine tiktoken: byte-level BPE whose merges stand in the order of their ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from preprocessing.tokenization.byte_level import bytes_of, normalizes
from preprocessing.tokenization.patterns import GPT2_PATTERN
from preprocessing.tokenization.reference_engine import Engine, Ids, Lengths, UnusableEngineError
from preprocessing.tokenization.tokenizer import Tokenizer


class TiktokenEngine:
    """tiktoken on one document after the other; it keeps no cache."""

    name = "tiktoken"

    def __init__(self, pattern: str, ranks: dict[bytes, int]) -> None:
        import tiktoken

        self._inner = tiktoken.Encoding("shardline", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        inner = self._inner
        found = [inner.encode_to_numpy(text, disallowed_special=()) for text in texts]
        lengths = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
        return (np.concatenate(found) if found else np.empty(0, dtype=np.uint32)), lengths


def tiktoken_engine(tokenizer: Tokenizer) -> Engine:
    """Return the engine of the `tiktoken` package.

    Raises:
        UnusableEngineError: The tokenizer's definition cannot be said in tiktoken's terms.
    """
    data = tokenizer.data
    pattern = _pattern(data)
    ranks = _ranks(data.get("model") or {})
    try:
        return TiktokenEngine(pattern, ranks)
    except Exception as error:  # tiktoken raises ValueError, KeyError and pyo3's PanicException
        raise UnusableEngineError(f"tiktoken refuses it ({error})") from error


def _pattern(data: Mapping[str, Any]) -> str:
    if normalizes(data):
        raise UnusableEngineError("tiktoken knows no normalizer")
    if any(not token.get("special") for token in data.get("added_tokens") or []):
        raise UnusableEngineError("tiktoken knows no added tokens in ordinary text")
    steps = data.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise UnusableEngineError("tiktoken runs byte-level BPE without prefix space only")
    if len(steps) == 1 and last.get("use_regex", True):
        return GPT2_PATTERN
    split = steps[0]
    pattern = (split.get("pattern") or {}).get("Regex")
    is_split = split.get("type") == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    if len(steps) != 2 or last.get("use_regex", True) or not is_split or not isinstance(pattern, str):
        raise UnusableEngineError("tiktoken takes one pattern and no other pre-tokenizer")
    return pattern


def _ranks(model: Mapping[str, Any]) -> dict[bytes, int]:
    """Return bytes and id of every token, where lower ids are merged earlier, as tiktoken does."""
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or model.get("end_of_word_suffix"):
        raise UnusableEngineError("tiktoken runs byte-level BPE only")
    ranks: dict[bytes, int] = {}
    for token, number in model["vocab"].items():
        found = bytes_of(token)
        if found is not None:
            ranks[found] = number
    made: set[int] = set()
    last = -1
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        number = model["vocab"][left + right]
        if number < last:
            raise UnusableEngineError("its merges do not stand in the order of their ids")
        last = number
        made.add(number)
    # A token that no merge makes, such as a special token in the vocabulary, must not come from text.
    keeps_all = bool(model.get("ignore_merges"))
    return {token: number for token, number in ranks.items() if len(token) == 1 or keeps_all or number in made}
