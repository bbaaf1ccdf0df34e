"""The one tokenizer: a definition of the Hugging Face `tokenizers` library, used so that text is text.

Special tokens that stand in a text as characters are not parsed, no post-processor adds BOS or EOS,
and truncation, padding and BPE dropout that the file may ask for are switched off.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError
from contracts.files import write_atomically
from contracts.json_text import parse_json

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
USUAL_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
USUAL_BOS_TOKENS = ("<|begin_of_text|>", "<s>", "<bos>", "[CLS]")

OUT_OF_REACH = -1e4  # a Unigram piece of a lower score is never chosen

# Megatron-LM's DType.optimal_dtype: below this many ids, tokens are uint16, else int32.
UINT16_VOCAB_LIMIT = 65500


class Tokenizer:
    """A tokenizer that treats text as text.

    Args:
        definition: The text of `tokenizer.json`.
        config: The content of `tokenizer_config.json`; empty where there is none.
        source: Where it came from, for messages.
    """

    def __init__(self, definition: str, config: Mapping[str, Any], source: str) -> None:
        import tokenizers

        # The library warns at every later fork unless told; parallelism here is by processes.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.source = source
        self.definition = definition
        self.config = config
        try:
            self._inner = tokenizers.Tokenizer.from_str(_with_special_tokens_out_of_reach(definition))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{source}: not a tokenizer of the `tokenizers` library ({error}).") from error
        self._inner.no_padding()
        self._inner.no_truncation()
        self._inner.encode_special_tokens = True
        if getattr(self._inner.model, "dropout", None):
            self._inner.model.dropout = None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without BOS or EOD."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        return [item.ids for item in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; special tokens are written out."""
        text: str = self._inner.decode([int(token) for token in ids], skip_special_tokens=False)
        return text

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Every token, added ones included, with its id."""
        vocab: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return vocab

    @cached_property
    def vocab_size(self) -> int:
        """Highest id + 1, so that an embedding of this many rows has a row for every token."""
        return max(self.vocab.values(), default=-1) + 1

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokens marked special, by id."""
        return tuple(item["content"] for item in self._added_tokens if item.get("special"))

    @cached_property
    def eod_id(self) -> int | None:
        """Id of the end-of-document token: the configured EOS, else a usual name; None if there is none."""
        return self._find(self._configured("eos_token"), USUAL_EOD_TOKENS)

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the BOS token: the configured one, else a usual name; None if there is none."""
        return self._find(self._configured("bos_token"), USUAL_BOS_TOKENS)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """uint16 or int32, as Megatron-LM chooses, by the highest id (added tokens included)."""
        return token_dtype(self.vocab_size)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name."""
        return self.vocab.get(token)

    def token(self, token_id: int) -> str | None:
        """Return the name of a token by its id."""
        name: str | None = self._inner.id_to_token(token_id)
        return name

    def require_eod(self, token: str | None = None) -> int:
        """Return the id of the end-of-document token.

        Args:
            token: Its name, where the tokenizer's own choice is not wanted.

        Raises:
            ConfigError: The tokenizer has no such token.
        """
        if token is not None:
            found = self.token_id(token)
            if found is None:
                raise ConfigError(f"ingest.eod_token is {token!r}, but the tokenizer {self.source} has no such token.")
            return found
        if self.eod_id is None:
            raise ConfigError(
                f"the tokenizer {self.source} defines no end-of-document token: no eos_token in {CONFIG_FILE}, and "
                f"none of {', '.join(USUAL_EOD_TOKENS)}. Name one with ingest.eod_token, or set "
                "ingest.append_eod: false (--no-eod)."
            )
        return self.eod_id

    def require_bos(self) -> int:
        """Return the id of the BOS token.

        Raises:
            ConfigError: The tokenizer has none.
        """
        if self.bos_id is None:
            raise ConfigError(
                f"ingest.add_bos is true, but the tokenizer {self.source} defines no BOS token: no bos_token in "
                f"{CONFIG_FILE}, and none of {', '.join(USUAL_BOS_TOKENS)}. Set ingest.add_bos: false."
            )
        return self.bos_id

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The content of `tokenizer.json`."""
        data: dict[str, Any] = parse_json(self.definition)
        return data

    @property
    def _added_tokens(self) -> list[dict[str, Any]]:
        return list(self.data.get("added_tokens") or [])

    def _configured(self, key: str) -> str | None:
        value = self.config.get(key)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        return value if isinstance(value, str) else None

    def _find(self, configured: str | None, usual: Sequence[str]) -> int | None:
        for token in (configured, *usual):
            if token is not None and token in self.vocab:
                return self.vocab[token]
        return None


def _with_special_tokens_out_of_reach(definition: str) -> str:
    """Cut texts of a Unigram model inside what looks like a special token, so that the model never finds one.

    The library's switch for special tokens only keeps it from looking for them beforehand; the
    model would still find "</s>" among its pieces. Nothing else is cut, and ids stay as they are.
    """
    if '"Unigram"' not in definition:
        return definition
    data = parse_json(definition)
    model = data.get("model") or {}
    unknown = model.get("unk_id")
    vocab = model.get("vocab") or []
    pieces = {text for number, (text, score) in enumerate(vocab) if number != unknown and score > OUT_OF_REACH}
    endings: dict[str, list[str]] = {}
    for token in data.get("added_tokens") or []:
        if token.get("special") and token["content"] in pieces and len(token["content"]) > 1:
            endings.setdefault(token["content"][0], []).append(token["content"][1:])
    if not endings:
        return definition
    pattern = "|".join(f"{re.escape(first)}(?={'|'.join(map(re.escape, rest))})" for first, rest in endings.items())
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "MergedWithPrevious", "invert": False}
    before = data.get("pre_tokenizer")
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*([before] if before else []), cut]}
    return json.dumps(data)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the token type of a vocabulary: uint16 below 65500 ids, else int32 (Megatron-LM's rule)."""
    return np.dtype("<u2" if vocab_size < UINT16_VOCAB_LIMIT else "<i4")


def keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """Write a copy of a tokenizer to `folder`/tokenizer; return that folder."""
    target = folder / "tokenizer"
    target.mkdir(exist_ok=True)
    write_tokenizer(tokenizer, target)
    return target


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and, if there is a configuration, `tokenizer_config.json`."""
    write_atomically(folder / TOKENIZER_FILE, tokenizer.definition)
    if tokenizer.config:
        write_atomically(folder / CONFIG_FILE, json.dumps(tokenizer.config, indent=1, ensure_ascii=False) + "\n")


def flat_ids(ids: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Join token lists: (total,) ids and (documents,) lengths."""
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    flat = np.fromiter((token for item in ids for token in item), dtype=np.uint32, count=int(lengths.sum()))
    return flat, lengths
