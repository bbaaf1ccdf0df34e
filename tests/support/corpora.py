"""Small corpora with every kind of text, made from a seed."""

import gzip
import json
import random
from pathlib import Path

WORDS = [
    "the",
    "model",
    "reads",
    "tokens",
    "naïve",
    "数据",
    "🙂",
    "don't",
    "x=1;",
    "\tif",
    "\n\n",
    "  two",
    "3.14",
    "é",
]


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 60 words, some of them not ASCII."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, 60))) + f" #{n}" for n in range(count)]


def write_corpus(path: Path, documents: list[str]) -> Path:
    """Write a JSONL file (gzip if its name says so) with two subsets and a few empty records."""
    lines = []
    for number, text in enumerate(documents):
        lines.append(
            json.dumps({"text": text, "meta": {"pile_set_name": f"Set{number % 2}"}}, ensure_ascii=number % 3 == 0)
        )
        if number % 10 == 9:
            lines.append(json.dumps({"text": ""}))
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
