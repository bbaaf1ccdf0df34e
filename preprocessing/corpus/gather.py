"""The corpus stage: documents in Pile form, split into a part to train on and a part held out.

Writes `train/*.jsonl.zst` and `heldout/*.jsonl.zst`; each line is
`{"text": ..., "meta": {"pile_set_name": subset, "source": where it came from}}`. Exact duplicates
are dropped, the first stays. A document is held out by the hash of its text, so that it stays on
its side when the corpus grows.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError, RecordError
from contracts.stage import Stage
from contracts.store import Workspace
from preprocessing.config import CorpusConfig
from preprocessing.corpus.machine_text import Candidate, candidates_digest, find_candidates
from preprocessing.ingestion.encoding import NO_SUBSET
from preprocessing.ingestion.shards import REJECTS
from preprocessing.reading.blocks import Position
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.pieces import file_blocks
from preprocessing.reading.records import RecordFormat, parse_block
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.sources import SourceSettings, expand_sources, raw_source_files, raw_source_identities

PARTS = ("train", "heldout")
ZSTD_LEVEL = 3

Document = tuple[str, str, str]  # text, subset, source


def gather(settings: CorpusConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Gather documents into `workspace.path`; return counts.

    Raises:
        RecordError: A record of `sources` is bad and `on_error` is "stop".
        InputError: There is no document, or a file is damaged.
        ConfigError: A source does not exist.
    """
    try:
        return _gather(settings, workspace)
    except (ConfigError, InputError):
        workspace.discard()
        raise


def _gather(settings: CorpusConfig, workspace: Workspace) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    subsets: dict[str, dict[str, Counter[str]]] = {part: {} for part in PARTS}
    for part in PARTS:
        shutil.rmtree(workspace.path / part, ignore_errors=True)
    if settings.sources:
        files = expand_sources(settings.sources, _source_settings(settings))
        documents = _user_documents(files, settings, counts, workspace.path)
    else:
        documents = _machine_documents(find_candidates(), settings, counts)
    seen: set[bytes] = set()
    with (
        _PartWriter(workspace.path / "train", settings.documents_per_file) as train,
        _PartWriter(workspace.path / "heldout", settings.documents_per_file) as heldout,
    ):
        for text, subset, source in documents:
            data = text.encode()
            digest = hashlib.blake2b(data, digest_size=16).digest()
            if digest in seen:
                counts["duplicates"] += 1
                continue
            seen.add(digest)
            is_heldout = is_held_out(digest, settings.heldout_fraction)
            (heldout if is_heldout else train).write(text, subset, source)
            numbers = subsets["heldout" if is_heldout else "train"].setdefault(subset, Counter())
            numbers["documents"] += 1
            numbers["bytes"] += len(data)
            counts["documents"] += 1
            counts["bytes"] += len(data)
            if counts["documents"] % 500 == 0:
                total = None if settings.sources else settings.max_bytes
                workspace.progress.update(counts["bytes"], total=total, unit="bytes", documents=counts["documents"])
    if not counts["documents"]:
        raise InputError("corpus: no document was found. Check corpus.sources and corpus.text_key.")
    return {
        **{
            name: counts[name]
            for name in ("documents", "bytes", "duplicates", "empty", "filtered", "rejected", "left_out")
        },
        "subsets": {part: {name: dict(n) for name, n in sorted(subsets[part].items())} for part in PARTS},
        **{f"{part}_documents": sum(n["documents"] for n in subsets[part].values()) for part in PARTS},
        **{f"{part}_bytes": sum(n["bytes"] for n in subsets[part].values()) for part in PARTS},
    }


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Tell whether a document is held out, by the digest of its text."""
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _machine_documents(
    candidates: Sequence[Candidate], settings: CorpusConfig, counts: Counter[str]
) -> Iterator[Document]:
    """Yield documents of this machine until there are `max_bytes`."""
    for candidate in candidates:
        if candidate.size_bytes > settings.max_document_bytes:
            counts["left_out"] += 1
            continue
        try:
            text = candidate.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            counts["left_out"] += 1
            continue
        for part, subset in _parts_of(candidate, text):
            if not part.strip():
                counts["empty"] += 1
            elif counts["bytes"] + len(part.encode()) <= settings.max_bytes:
                yield part, subset, candidate.name
            else:
                return


def _parts_of(candidate: Candidate, text: str) -> list[tuple[str, str]]:
    """Cut METADATA into its header fields and the README below them."""
    if candidate.subset != "PackageMetadata":
        return [(text, candidate.subset)]
    fields, _, readme = text.partition("\n\n")
    return [(fields + "\n", candidate.subset), *([(readme, "Documentation")] if readme.strip() else [])]


def _user_documents(
    files: Sequence[SourceFile], settings: CorpusConfig, counts: Counter[str], folder: Path
) -> Iterator[Document]:
    form = RecordFormat(
        settings.text_key,
        settings.subset_key,
        content=settings.format,
        text_unit=settings.text_unit,
        checked_only=settings.on_error == "quarantine",
    )
    rejects = []
    for number, file in enumerate(files):
        try:
            for block in file_blocks(file, Position(number), form=form):
                parsed = parse_block(block, form)
                if parsed.rejects and settings.on_error == "stop":
                    first = parsed.rejects[0]
                    raise RecordError(first.file, first.line, first.reason)
                rejects += [vars(reject) for reject in parsed.rejects]
                counts["rejected"] += len(parsed.rejects)
                counts["empty"] += len(parsed.empty_lines)
                counts["filtered"] += len(parsed.filtered)
                for record in parsed.records():
                    yield record.text, record.subset or NO_SUBSET, f"{record.file}:{record.line}"
        except DamagedStreamError as error:
            if settings.on_error == "stop":
                raise
            rejects.append({"file": file.name, "reason": error.reason})
    if rejects:
        (folder / REJECTS).write_text("".join(json.dumps(item) + "\n" for item in rejects), encoding="utf-8")


class _PartWriter:
    """Writes documents to `NNNNN.jsonl.zst` files of one folder."""

    def __init__(self, folder: Path, documents_per_file: int) -> None:
        self._folder = folder
        self._limit = documents_per_file
        self._num_files = 0
        self._documents_in_file = 0
        self._file: Any = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def write(self, text: str, subset: str, source: str) -> None:
        import orjson

        record = {"text": text, "meta": {"pile_set_name": subset, "source": source}}
        if self._file is None:
            self._open()
        self._file.write(orjson.dumps(record) + b"\n")
        self._documents_in_file += 1
        if self._documents_in_file >= self._limit:
            self._finish_file()

    def _open(self) -> None:
        import zstandard

        raw = self._name(".tmp").open("wb")
        self._file = zstandard.ZstdCompressor(level=ZSTD_LEVEL).stream_writer(raw)

    def _finish_file(self) -> None:
        self._file.close()
        self._file = None
        self._name(".tmp").replace(self._name(""))
        self._num_files += 1
        self._documents_in_file = 0

    def _name(self, suffix: str) -> Path:
        return self._folder / f"{self._num_files:05d}.jsonl.zst{suffix}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._finish_file()


def _source_settings(settings: CorpusConfig) -> SourceSettings:
    return SourceSettings(setting="corpus.sources", is_text_wanted=settings.format == "text", preset=settings.preset)


def _raw_files(settings: CorpusConfig) -> dict[str, Path]:
    return raw_source_files(settings.sources, _source_settings(settings))


def _raw(settings: CorpusConfig) -> dict[str, str]:
    if settings.sources:
        return raw_source_identities(settings.sources, _source_settings(settings))
    return {"machine": candidates_digest(find_candidates())}


CORPUS = Stage(
    name="corpus",
    version=1,
    kind="corpus",
    settings=CorpusConfig,
    work=gather,
    raw_files=_raw_files,
    raw=_raw,
    refuses_changes=True,
)
