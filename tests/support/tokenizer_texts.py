"""Texts that tokenizers get wrong, and small tokenizers of every kind that are trained on them."""

import base64
import functools
import json
from pathlib import Path
from typing import Any

HARD_TEXTS = (
    *("", " ", "  ", "   x", "a\n  b", "a\n  ", "\r\n", "a\r\nb\r\n  ", "\t\tx", "\x0b", "\x1c", "\x85\u2028x"),
    *(
        "e\u0301 é",
        "A\u030a",
        "\u0301start",
        "\u00a0x\u00a0",
        "\u3000x",
        "\ufeffBOM",
        "soft\u00adhyphen zero\u200bwidth",
    ),
    *("数据 数据库", "日本語テキスト", "한국어 텍스트", "Ω й ½ ²", "ﬁ ﬀ Å ｆｕｌｌ", "…—“”"),
    *("👩‍👩‍👧‍👦 👍🏽", "🇩🇪🇫🇷", "a\0b", "\0", "<|endoftext|>", "a<|endoftext|>b", "<s></s> <unk>", "[SEP] [MASK]"),
    *(
        "it's I'LL WE'VE 'ſ don't",
        "123456 ٣٤ 1,000",
        "_under_score (x)",
        "the   quick  brown",
        "x" * 3000,
        " " * 300 + "y",
    ),
)
TRAINING_TEXTS = (*HARD_TEXTS, Path(json.__file__).read_text(encoding="utf-8"), Path(functools.__file__).read_text())


def byte_level_definition(pattern: str | None = None, *, vocab_size: int = 400, **changes: Any) -> dict[str, Any]:
    """A trained byte-level BPE tokenizer under a pattern; None: GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator([text for text in TRAINING_TEXTS for _ in range(3)], trainer)
    definition: dict[str, Any] = json.loads(inner.to_str())
    if pattern is not None:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return definition | changes


def write_rank_file(path: Path, ranks: dict[bytes, int]) -> Path:
    """Write tiktoken's format."""
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda x: x[1]))
    path.write_bytes(b"".join(lines))
    return path


def example_ranks() -> dict[bytes, int]:
    """Ranks as tiktoken wants them: the bytes first, then the merges of a trained tokenizer in their order."""
    from preprocessing.tokenization.byte_level import bytes_of

    model = byte_level_definition()["model"]
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [(bytes_of(left) or b"") + (bytes_of(right) or b"") for left, right in model["merges"]]
    return {token: rank for rank, token in enumerate(tokens)}
