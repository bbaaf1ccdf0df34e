"""A dataset artifact of a few hundred short documents, made by the real stages."""

import json
import random
from pathlib import Path

from contracts.artifact import Artifact
from contracts.store import ArtifactStore
from preprocessing.config import IngestConfig, TokenizerConfig
from preprocessing.stages import INGEST, TOKENIZER

_WORDS = ["the", "a", "shard", "line", "model", "token", "reads", "writes", "layer", "block", "of", "and"]


def write_corpus(path: Path, *, documents: int = 400) -> list[str]:
    """Write documents with two subsets as JSON lines and return their texts."""
    draw = random.Random(7)
    texts = [" ".join(draw.choices(_WORDS, k=draw.randint(5, 60))) + f" number {n}." for n in range(documents)]
    lines = [
        json.dumps({"text": text, "meta": {"pile_set_name": "even" if n % 2 == 0 else "odd"}})
        for n, text in enumerate(texts)
    ]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return texts


def make_dataset(store: ArtifactStore, corpus: Path) -> Artifact:
    """Train a tokenizer of 300 tokens on the corpus and ingest it."""
    sources = (str(corpus),)
    tokenizer = TOKENIZER.run(TokenizerConfig(sources=sources, vocab_size=300), store=store, label="tiny")
    settings = IngestConfig(sources=sources, workers=1)
    return INGEST.run(settings, inputs={"tokenizer": tokenizer}, store=store, label="tiny")
