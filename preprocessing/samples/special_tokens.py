"""Special tokens that samples are made with, found in a tokenizer under their usual names."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError
from preprocessing.tokenization.tokenizer import Tokenizer

CLS = ("[CLS]", "<s>", "<cls>")
SEP = ("[SEP]", "</s>", "<sep>")
MASK = ("[MASK]", "<mask>", "<|mask|>")
PAD = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>")
FIM_PREFIX = ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<PRE>")
FIM_MIDDLE = ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<MID>")
FIM_SUFFIX = ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<SUF>")
SENTINEL = "<extra_id_{}>"


@dataclass(frozen=True)
class BertTokens:
    """Ids that BERT's samples need.

    Args:
        ordinary: (tokens,) ids that are no special tokens, from which random replacements are drawn.
        is_ordinary: (vocab,) the same, by id.
        continues_word: (vocab,) True for a token that goes on with the word before it.
    """

    cls: int
    sep: int
    mask: int
    pad: int
    ordinary: npt.NDArray[np.int64]
    is_ordinary: npt.NDArray[np.bool_]
    continues_word: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class FimTokens:
    """Ids that stand before the prefix, the middle and the suffix."""

    prefix: int
    middle: int
    suffix: int


def bert_tokens(tokenizer: Tokenizer) -> BertTokens:
    """Find the tokens of BERT's samples.

    Raises:
        ConfigError: The tokenizer lacks one.
    """
    special = {tokenizer.vocab[name] for name in tokenizer.special_tokens if name in tokenizer.vocab}
    ordinary = np.array(sorted(set(tokenizer.vocab.values()) - special), dtype=np.int64)
    cls, sep, mask, pad = (_find(tokenizer, names, "bert") for names in (CLS, SEP, MASK, PAD))
    is_ordinary = np.zeros(tokenizer.vocab_size, dtype=bool)
    is_ordinary[ordinary] = True
    return BertTokens(cls, sep, mask, pad, ordinary, is_ordinary, _continues_word(tokenizer))


def fim_tokens(tokenizer: Tokenizer) -> FimTokens:
    """Find the tokens of fill-in-the-middle samples.

    Raises:
        ConfigError: The tokenizer lacks one.
    """
    return FimTokens(*(_find(tokenizer, names, "fim") for names in (FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX)))


def sentinel_tokens(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Return the ids of T5's sentinels, in order: <extra_id_0>, <extra_id_1>, and so on.

    Raises:
        ConfigError: The tokenizer has none.
    """
    found: list[int] = []
    while (token := tokenizer.token_id(SENTINEL.format(len(found)))) is not None:
        found.append(token)
    if not found:
        raise ConfigError(
            f"the tokenizer of {tokenizer.source} has no sentinel tokens ({SENTINEL.format(0)} and on), which t5 "
            "samples need. Train one with  shardline tokenizer -s special_tokens=[t5]  (100 of them), or take T5's."
        )
    return np.array(found, dtype=np.int64)


def _find(tokenizer: Tokenizer, names: Sequence[str], objective: str) -> int:
    found = next((token for name in names if (token := tokenizer.token_id(name)) is not None), None)
    if found is None:
        raise ConfigError(
            f"the tokenizer of {tokenizer.source} has none of {', '.join(names)}, which {objective} samples need. "
            f"Train one with  shardline tokenizer -s special_tokens=[{objective}], or take another."
        )
    return found


def _continues_word(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Tell tokens that go on with a word: "##x" of WordPiece; of other models, those without a leading space."""
    model = (tokenizer.data.get("model") or {}).get("type")
    prefix = (tokenizer.data.get("model") or {}).get("continuing_subword_prefix") or "##"
    result = np.zeros(tokenizer.vocab_size, dtype=bool)
    for name, token in tokenizer.vocab.items():
        if model == "WordPiece":
            result[token] = name.startswith(prefix)
        else:
            # A word of byte-level BPE begins with Ġ, of SentencePiece with ▁; punctuation stands alone.
            result[token] = bool(name) and name[0].isalnum()
    return result
