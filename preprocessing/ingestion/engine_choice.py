"""Which engine runs the tokenizer in a build, and what happens when one is found wrong.

An engine that differs from the reference anywhere is barred from the whole build, on all machines, by
a file in its folder; parts that hold shards of it are done again by another engine.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from contracts.errors import InputError, LockedError
from contracts.files import write_atomically
from contracts.json_text import parse_json
from contracts.progress import Progress
from preprocessing.ingestion.parts import UNFINISHED, IngestJob, Part
from preprocessing.ingestion.shards import PartState, read_state
from preprocessing.reading.blocks import Position
from preprocessing.reading.pieces import piece_blocks
from preprocessing.reading.records import RecordFormat, parse_block
from preprocessing.reading.source_file import SourceFile
from preprocessing.tokenization.audit import EngineRejectedError, audited_texts, first_difference
from preprocessing.tokenization.engines import ENGINES, engine_names, engine_version, make_engine
from preprocessing.tokenization.reference_engine import UnusableEngineError
from preprocessing.tokenization.tokenizer import Tokenizer

AUDITED_PLACES = 16  # spread over the corpus
PLACE_CHARACTERS = 2**15  # compared at each: half a million in all, about 0.2 CPU-s of the reference


def chosen_engine(
    setting: str,
    tokenizer: Tokenizer,
    texts: Callable[[], Sequence[str]],
    *,
    size_bytes: int,
    folder: Path,
    progress: Progress,
) -> str:
    """Return the first engine that can run the tokenizer, is not barred, and passes the audit.

    Args:
        texts: Reads what is compared; called at most once.
        size_bytes: Input on disk.

    Raises:
        ConfigError: The engine asked for is not installed.
    """
    barred = {item["engine"] for item in barred_engines(folder)}
    read: list[str] | None = None
    for name in engine_names(setting, size_bytes):
        if name in barred:
            continue
        try:
            engine = make_engine(name, tokenizer)
        except UnusableEngineError as error:
            if name == setting:
                progress.note(f"ingest.engine: {name} cannot run this tokenizer ({error})")
            continue
        if not ENGINES[name].is_fast:
            return name
        read = list(texts()) if read is None else read
        wrong = first_difference(engine, tokenizer, read)
        if wrong is None:
            return name
        bar_engine(folder, EngineRejectedError(name, f"text {wrong + 1} of the first audit"), progress)
    return "tokenizers"


def spread_texts(files: Sequence[SourceFile], parts: Sequence[Part], form: RecordFormat) -> list[str]:
    """Take texts for the audit from places spread over the corpus, each at the start of a piece."""
    pieces = [piece for part in parts for piece in part.pieces]
    step = max(1, len(pieces) // AUDITED_PLACES)
    texts: list[str] = []
    for piece in pieces[::step][:AUDITED_PLACES]:
        try:
            block = next(iter(piece_blocks(files[piece.file], piece, Position(), form=form)), None)
        except InputError:
            continue  # reading the corpus says what is wrong
        found = [] if block is None else parse_block(block, form).texts
        texts += _spread(found, PLACE_CHARACTERS)
    return texts


def _spread(texts: Sequence[str], characters: int) -> Iterator[str]:
    """Yield every n-th text, so that about `characters` come from all over the block."""
    step = max(1, sum(map(len, texts)) // characters)
    for text in texts[::step]:
        if characters <= 0:
            return
        for part in audited_texts(text):
            yield part[:characters]
        characters -= len(text)


def bar_engine(folder: Path, error: EngineRejectedError, progress: Progress) -> None:
    """Bar an engine from the build in `folder`."""
    path = folder / UNFINISHED / f"barred-{error.engine}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    version = engine_version(error.engine)
    write_atomically(path, json.dumps({"engine": error.engine, "version": version, "place": error.place}))
    progress.note(f"{error}; it is not used in this run, and nothing that it made is kept")


def barred_engines(folder: Path) -> list[dict[str, Any]]:
    """Return engine, version and place of each engine that was barred from the build."""
    return [parse_json(path.read_text("utf-8")) for path in sorted((folder / UNFINISHED).glob("barred-*.json"))]


def drop_barred_parts(job: IngestJob) -> None:
    """Remove the parts that hold shards of a barred engine, so that they are done again.

    A part that another process is at is left to it: what it makes is looked at before the end.
    """
    barred = {item["engine"] for item in barred_engines(job.folder)}
    if not barred:
        return
    for number in range(len(job.parts)):
        folder = job.part_folder(number)
        if barred.isdisjoint(read_state(folder).engines):
            continue
        try:
            with job.part_lease(number, wait_s=0):
                shutil.rmtree(folder)
        except LockedError:
            continue


def engine_provenance(folder: Path, states: Sequence[PartState]) -> dict[str, Any]:
    """Return what made the dataset's tokens, by name and version, and which engines were barred."""
    names = sorted({name for state in states for name in state.engines})
    return {"used": {name: engine_version(name) for name in names}, "barred": barred_engines(folder)}
