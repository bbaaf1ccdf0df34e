"""Small datasets whose documents are rows of sentences, with a tokenizer that has every special token."""

from pathlib import Path

import numpy as np

from preprocessing.dataset.indexed_dataset import PairWriter
from preprocessing.dataset.token_dataset import TokenDataset

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(20))
WORDS = tuple(f"word{number}" for number in range(40))
ENDINGS = tuple(f"##end{number}" for number in range(40))


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a WordPiece tokenizer; return its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = (*SPECIALS, *SENTINELS, "<|endoftext|>", *WORDS, *ENDINGS)
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([*SPECIALS, *SENTINELS, "<|endoftext|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return vocab


def sentence_dataset(folder: Path, *, documents: int = 40, seed: int = 0, sentences: int = 6) -> TokenDataset:
    """Write a folder with one pair; each word of a sentence has 0 to 2 endings, each document ends in EOD."""
    vocab = write_tokenizer(folder / "tokenizer")
    random = np.random.default_rng(seed)
    writer = PairWriter(folder / "data-00000", np.dtype("<u2"))
    for _ in range(documents):
        rows = []
        for _ in range(int(random.integers(1, sentences + 1))):
            ids: list[int] = []
            for _ in range(int(random.integers(2, 8))):
                ids.append(vocab[WORDS[int(random.integers(40))]])
                ids += [vocab[ENDINGS[int(random.integers(40))]] for _ in range(int(random.integers(3)))]
            rows.append(ids)
        rows[-1].append(vocab["<|endoftext|>"])
        joined = np.array([token for row in rows for token in row], dtype=np.uint16)
        writer.append_sequences(joined, np.array([len(row) for row in rows]), np.array([len(rows)]))
    writer.finish()
    return TokenDataset(folder)
