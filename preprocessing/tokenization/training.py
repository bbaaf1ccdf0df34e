"""The tokenizer stage: train a vocabulary on a corpus.

The same corpus and settings give the same bytes, except for Unigram, where the library adds up
floats in the order of a hash table: pieces agree, scores differ by about 1e-3. Byte-level BPE is
lossless and is the default. WordPiece and Unigram have an unknown token; text that does not
survive them is reported by the ingest stage's round-trip check.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError, RecordError
from contracts.progress import Progress
from contracts.stage import Stage
from contracts.store import Workspace
from preprocessing.config import END_OF_DOCUMENT, TokenizerConfig
from preprocessing.reading.blocks import LineBlock, Position
from preprocessing.reading.kinds import detect_kind
from preprocessing.reading.names import DATA_SUFFIXES
from preprocessing.reading.pieces import file_blocks, read_records
from preprocessing.reading.records import RecordFormat, Reject
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.sources import SourceSettings, raw_source_files, raw_source_identities, source_files
from preprocessing.tokenization.tokenizer import CONFIG_FILE, TOKENIZER_FILE

WORDPIECE_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", END_OF_DOCUMENT)
UNIGRAM_SPECIALS = ("<unk>", END_OF_DOCUMENT)
WORDPIECE_ALPHABET = 1000  # as in the library's own trainer; rarer characters become [UNK]
OnReject = Callable[[Reject], None] | None
_JSON_LINES = RecordFormat(content="jsonl")
SAMPLE = "def f(x):\n\treturn x  # naïve, 数, ﬁ 🙂"


def train(settings: TokenizerConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Train on the corpus and write `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        InputError: The corpus holds no text, or less than the vocabulary needs.
        RecordError: A record is bad, such as one with bytes that are not UTF-8, and `on_error` is "stop".
    """
    try:
        return _train(settings, inputs, workspace)
    except (ConfigError, InputError):
        workspace.discard()
        raise


def _train(settings: TokenizerConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    files = source_files(settings.sources, inputs, _source_settings(settings))
    texts = _Texts(files, settings, workspace.progress)
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


class _Texts:
    """Iterates over the training texts and counts what was given."""

    def __init__(self, files: Sequence[SourceFile], settings: TokenizerConfig, progress: Progress) -> None:
        self._files = files
        self._settings = settings
        self._progress = progress
        self.rewind()

    def rewind(self) -> None:
        """Count from 0 again; an iteration always begins with the first file."""
        self.num_documents = 0
        self.num_bytes = 0
        self.num_rejected = 0

    def __iter__(self) -> Iterator[str]:
        form = RecordFormat(
            text_key=self._settings.text_key, content=self._settings.format, text_unit=self._settings.text_unit
        )
        limit = self._settings.max_bytes
        for file in self._files:
            on_reject = self._count if self._settings.on_error == "quarantine" else None
            texts = (
                _plain_lines(file, on_reject) if _is_plain_text(file, form) else _record_texts(file, form, on_reject)
            )
            for text in texts:
                size = len(text.encode())
                if self.num_bytes + size > limit:
                    return
                self.num_documents += 1
                self.num_bytes += size
                if self.num_documents % 1000 == 0:
                    self._progress.update(self.num_bytes, total=None, unit="bytes", documents=self.num_documents)
                yield text

    def _count(self, reject: Reject) -> None:
        self.num_rejected += 1
        if self.num_rejected == 1:
            self._progress.note(f"passed over: {reject.file}, line {reject.line}: {reject.reason}")


def _record_texts(file: SourceFile, form: RecordFormat, on_reject: OnReject) -> Iterator[str]:
    return (record.text for record in read_records([file], form, on_reject=on_reject))


def _is_plain_text(file: SourceFile, form: RecordFormat) -> bool:
    """Tell a file without a form or a known name that holds lines of text, by its first character."""
    is_of_lines = detect_kind(file, _JSON_LINES).content == "json_lines"
    if form.content != "auto" or not is_of_lines or file.file_name.endswith(DATA_SUFFIXES):
        return False  # damaged JSON is an error, never text to learn from
    for block in file_blocks(file, Position(), form=_JSON_LINES, block_bytes=1):
        data = block.data.lstrip(b"\xef\xbb\xbf \t\r\n\0") if isinstance(block, LineBlock) else b"{"
        if data:
            return not data.startswith(b"{")
    return False


def _plain_lines(file: SourceFile, on_reject: OnReject) -> Iterator[str]:
    for block in file_blocks(file, Position(), form=_JSON_LINES):
        if not isinstance(block, LineBlock):
            return
        for number, line in enumerate(block.data.splitlines(keepends=True), block.start.line):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                place = f"byte 0x{line[error.start]:02x} at position {error.start} of the line"
                reason = f"{place} is not valid UTF-8"
                if on_reject is None:
                    raise RecordError(file.name, number, reason) from None
                on_reject(Reject(file.name, number, 0, reason))


def _trained(settings: TokenizerConfig, texts: _Texts) -> Any:
    """Return a trained `tokenizers.Tokenizer`."""
    return {"bpe": _train_bpe, "wordpiece": _train_wordpiece, "unigram": _train_unigram}[settings.kind](settings, texts)


def _train_bpe(settings: TokenizerConfig, texts: _Texts) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    return _fitted(tokenizer, trainer, texts)


def _train_wordpiece(settings: TokenizerConfig, texts: _Texts) -> Any:
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
        special_tokens=[*WORDPIECE_SPECIALS, *continuing],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    data = json.loads(_fitted(tokenizer, trainer, texts).to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("##")]
    return Tokenizer.from_str(json.dumps(data))


def _alphabet(texts: _Texts, limit: int) -> list[str]:
    """Return the most frequent characters, in the order of their code points."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    texts.rewind()
    frequent = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    return sorted(frequent[:limit])


def _train_unigram(settings: TokenizerConfig, texts: _Texts) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=list(UNIGRAM_SPECIALS),
        unk_token="<unk>",
        show_progress=False,
    )
    return _fitted(tokenizer, trainer, texts)


def _fitted(tokenizer: Any, trainer: Any, texts: _Texts) -> Any:
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
)
