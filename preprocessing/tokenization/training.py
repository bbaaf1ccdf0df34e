"""The tokenizer stage: train a vocabulary on a corpus, or take one over.

The same corpus and settings give the same bytes, except for Unigram, where the library adds up
floats in the order of a hash table: pieces agree, scores differ by about 1e-3. Byte-level BPE is
lossless and is the default. WordPiece and Unigram have an unknown token; text that does not
survive them is reported by the ingest stage's round-trip check.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError
from contracts.stage import Stage
from contracts.store import Workspace
from preprocessing.config import END_OF_DOCUMENT, TokenizerConfig
from preprocessing.reading.sources import SourceSettings, raw_source_files, raw_source_identities, source_files
from preprocessing.tokenization.loading import load_tokenizer, tokenizer_files, tokenizer_format
from preprocessing.tokenization.tokenizer import CONFIG_FILE, TOKENIZER_FILE, write_tokenizer
from preprocessing.tokenization.training_texts import TrainingTexts

WORDPIECE_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", END_OF_DOCUMENT)
UNIGRAM_SPECIALS = ("<unk>", END_OF_DOCUMENT)
WORDPIECE_ALPHABET = 1000  # as in the library's own trainer; rarer characters become [UNK]
SAMPLE = "def f(x):\n\treturn x  # naïve, 数, ﬁ 🙂"


def train(settings: TokenizerConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Train on the corpus, or take over the tokenizer at `settings.load`; write its two files.

    Raises:
        ConfigError: The tokenizer to take over cannot be read.
        InputError: The corpus holds no text, or less than the vocabulary needs.
        RecordError: A record is bad, such as one with bytes that are not UTF-8, and `on_error` is "stop".
    """
    try:
        return _take_over(settings, inputs, workspace) if settings.load else _train(settings, inputs, workspace)
    except (ConfigError, InputError):
        workspace.discard()
        raise


def _take_over(settings: TokenizerConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Make an artifact of a tokenizer that exists, in whichever format."""
    if settings.sources or settings.preset or inputs:
        raise ConfigError("tokenizer.load takes a tokenizer as it is: leave the sources and the corpus out, or load.")
    path = settings.load or ""
    tokenizer = load_tokenizer(path, encoding=settings.encoding)
    write_tokenizer(tokenizer, workspace.path)
    eod = tokenizer.eod_id
    if eod is None:
        workspace.progress.note(
            f"{path} names no end-of-document token; ingest needs --eod-token, or --no-eod to write none"
        )
    return {
        "model": (tokenizer.data.get("model") or {}).get("type", "BPE").lower(),
        "vocab_size": tokenizer.vocab_size,
        "eod_token": None if eod is None else tokenizer.token(eod),
        "eod_id": eod,
        "format": tokenizer_format(path),
        "sample_survives": tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE,
    }


def _train(settings: TokenizerConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    files = source_files(settings.sources, inputs, _source_settings(settings))
    texts = TrainingTexts(files, settings, workspace.progress)
    inner = _trained(settings, texts)
    if not texts.num_documents:
        raise InputError(
            f"tokenizer: {len(files)} files hold no text to train on. Check tokenizer.text_key and the sources."
        )
    inner.save(str(workspace.path / f"{TOKENIZER_FILE}.tmp"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT, "model_max_length": 10**9}
    unknown = {"wordpiece": "[UNK]", "unigram": "<unk>"}.get(settings.kind)
    if unknown is not None:
        config["unk_token"] = unknown
    (workspace.path / f"{CONFIG_FILE}.tmp").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in (TOKENIZER_FILE, CONFIG_FILE):
        (workspace.path / f"{name}.tmp").replace(workspace.path / name)
    vocab = inner.get_vocab(with_added_tokens=True)
    if len(vocab) < settings.vocab_size:
        workspace.progress.note(
            f"tokenizer.vocab_size is {settings.vocab_size}, but the corpus gave only {len(vocab)} tokens"
        )
    return {
        "model": settings.kind,
        "vocab_size": max(vocab.values()) + 1,
        "eod_token": END_OF_DOCUMENT,
        "eod_id": vocab[END_OF_DOCUMENT],
        "trained_documents": texts.num_documents,
        "trained_bytes": texts.num_bytes,
        "rejected": texts.num_rejected,
        "sample_survives": inner.decode(inner.encode(SAMPLE, add_special_tokens=False).ids) == SAMPLE,
    }


def _trained(settings: TokenizerConfig, texts: TrainingTexts) -> Any:
    """Return a trained `tokenizers.Tokenizer`."""
    return {"bpe": _train_bpe, "wordpiece": _train_wordpiece, "unigram": _train_unigram}[settings.kind](settings, texts)


def _train_bpe(settings: TokenizerConfig, texts: TrainingTexts) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=[END_OF_DOCUMENT, *settings.extra_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    return _fitted(tokenizer, trainer, texts)


def _train_wordpiece(settings: TokenizerConfig, texts: TrainingTexts) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    alphabet = _alphabet(texts, min(WORDPIECE_ALPHABET, settings.vocab_size // 4))
    # The library numbers "##x" tokens in the order of a hash table, and ties between merges follow
    # the numbers. Named beforehand as special tokens they have a fixed order; they are special no
    # more afterwards.
    continuing = [f"##{character}" for character in alphabet]
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=[*_with_extra(WORDPIECE_SPECIALS, settings), *continuing],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    data = json.loads(_fitted(tokenizer, trainer, texts).to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("##")]
    return Tokenizer.from_str(json.dumps(data))


def _with_extra(names: Sequence[str], settings: TokenizerConfig) -> list[str]:
    return list(dict.fromkeys([*names, *settings.extra_tokens]))


def _alphabet(texts: TrainingTexts, limit: int) -> list[str]:
    """Return the most frequent characters, in the order of their code points."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    texts.rewind()
    frequent = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    return sorted(frequent[:limit])


def _train_unigram(settings: TokenizerConfig, texts: TrainingTexts) -> Any:
    texts.note(
        f"unigram training is slow: about half a minute for each MB of text, of which up to "
        f"{settings.max_bytes / 1e6:.0f} MB are taken (tokenizer.max_bytes)"
    )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=_with_extra(UNIGRAM_SPECIALS, settings),
        unk_token="<unk>",
        show_progress=False,
    )
    return _fitted(tokenizer, trainer, texts)


def _fitted(tokenizer: Any, trainer: Any, texts: TrainingTexts) -> Any:
    try:
        tokenizer.train_from_iterator(iter(texts), trainer=trainer)
    except (ConfigError, InputError):
        raise
    except Exception as error:  # the library raises bare Exception
        cause = error.__cause__ or error.__context__
        if isinstance(cause, InputError):
            raise cause from None
        raise InputError(
            f"tokenizer: training failed ({error}). A larger corpus or a smaller vocab_size may help."
        ) from error
    return tokenizer


def _source_settings(settings: TokenizerConfig) -> SourceSettings:
    return SourceSettings(setting="tokenizer.sources", is_text_wanted=settings.format == "text", preset=settings.preset)


def _raw_files(settings: TokenizerConfig) -> dict[str, Path]:
    if settings.load:
        return {f"tokenizer/{name}": path for name, path in tokenizer_files(settings.load).items()}
    return raw_source_files(settings.sources, _source_settings(settings))


def _raw(settings: TokenizerConfig) -> dict[str, str]:
    return raw_source_identities(settings.sources, _source_settings(settings))


TOKENIZER = Stage(
    name="tokenizer",
    version=1,
    kind="tokenizer",
    settings=TokenizerConfig,
    work=train,
    raw_files=_raw_files,
    raw=_raw,
    refuses_changes=True,
)
