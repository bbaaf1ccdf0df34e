"""Texts to train a tokenizer on: the head of a corpus, or a sample from all over it.

The sample is a function of the files and of the settings alone. Files are cut into pieces where they
can be, and pieces spread evenly are read; a file that is one stream is read through. In both, as
much is taken at every place as keeps pace with the share of the corpus that has passed.
"""

from collections.abc import Callable, Iterator, Sequence

from contracts.errors import RecordError
from contracts.progress import Progress
from preprocessing.config import MIB, TokenizerConfig
from preprocessing.reading.blocks import Block, LineBlock, Position
from preprocessing.reading.kinds import detect_kind
from preprocessing.reading.names import DATA_SUFFIXES
from preprocessing.reading.pieces import cut_file, file_blocks, piece_blocks
from preprocessing.reading.records import RecordFormat, Reject, parse_block
from preprocessing.reading.source_file import SourceFile

OnReject = Callable[[Reject], None] | None

PIECE_BYTES = 4 * MIB
SPREAD_PIECES = 256  # read of a file that can be cut, at least
_JSON_LINES = RecordFormat(content="jsonl")


class TrainingTexts:
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

    def note(self, text: str) -> None:
        """Tell the user something."""
        self._progress.note(text)

    def __iter__(self) -> Iterator[str]:
        limit = self._settings.max_bytes
        for text in self._spread_texts() if self._settings.sample == "spread" else self._all_texts():
            size = len(text.encode())
            if self.num_bytes + size > limit:
                return
            self.num_documents += 1
            self.num_bytes += size
            if self.num_documents % 1000 == 0:
                self._progress.update(self.num_bytes, total=None, unit="bytes", documents=self.num_documents)
            yield text

    def _all_texts(self) -> Iterator[str]:
        for file in self._files:
            form, read = self._reader(file)
            for block in file_blocks(file, Position(), form=form):
                yield from read(block)

    def _spread_texts(self) -> Iterator[str]:
        share = self._settings.max_bytes / max(1, sum(file.size_bytes for file in self._files))
        passed_bytes = 0
        for number, file in enumerate(self._files):
            form, read = self._reader(file)
            for block, part in _places(file, number, form, share * file.size_bytes):
                wanted = share * (passed_bytes + part * file.size_bytes) - self.num_bytes
                if wanted > 0:
                    yield from _evenly(read(block), wanted)
            passed_bytes += file.size_bytes

    def _reader(self, file: SourceFile) -> tuple[RecordFormat, Callable[[Block], list[str]]]:
        """Return how a file is cut, and what turns its blocks into texts."""
        settings = self._settings
        form = RecordFormat(text_key=settings.text_key, content=settings.format, text_unit=settings.text_unit)
        if _is_plain_text(file, form):
            return _JSON_LINES, lambda block: list(_plain_lines(file, block, self._on_reject))
        return form, lambda block: self._records_of(block, form)

    def _records_of(self, block: Block, form: RecordFormat) -> list[str]:
        parsed = parse_block(block, form)
        for reject in parsed.rejects:
            self._on_reject(reject)
        return parsed.texts

    def _on_reject(self, reject: Reject) -> None:
        if self._settings.on_error == "stop":
            raise RecordError(reject.file, reject.line, reject.reason)
        self.num_rejected += 1
        if self.num_rejected == 1:
            self._progress.note(f"passed over: {reject.file}, line {reject.line}: {reject.reason}")


def _places(file: SourceFile, number: int, form: RecordFormat, budget_bytes: float) -> Iterator[tuple[Block, float]]:
    """Yield blocks of a file from all over it, each with the share of the file that has passed after it."""
    pieces = cut_file(file, number, piece_bytes=PIECE_BYTES, form=form)
    if len(pieces) == 1:
        for block in piece_blocks(file, pieces[0], Position(), form=form):
            yield block, min(1.0, block.file_bytes_read / max(1, file.size_bytes))
        return
    count = min(len(pieces), max(SPREAD_PIECES, int(2 * budget_bytes / PIECE_BYTES)))
    for place in range(count):
        piece = pieces[place * len(pieces) // count]
        for block in piece_blocks(file, piece, Position(), form=form):
            part = min(1.0, block.file_bytes_read / max(1, piece.size_bytes))
            yield block, (place + part) / count


def _evenly(texts: Sequence[str], wanted: float) -> Iterator[str]:
    """Yield every n-th text, about `wanted` characters of them."""
    step = max(1, int(sum(map(len, texts)) / wanted))
    for text in texts[::step]:
        if wanted <= 0:
            return
        yield text
        wanted -= len(text)


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


def _plain_lines(file: SourceFile, block: Block, on_reject: Callable[[Reject], None]) -> Iterator[str]:
    if not isinstance(block, LineBlock):
        return
    for number, line in enumerate(block.data.splitlines(keepends=True), block.start.line):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            place = f"byte 0x{line[error.start]:02x} at position {error.start} of the line"
            on_reject(Reject(file.name, number, 0, f"{place} is not valid UTF-8"))
