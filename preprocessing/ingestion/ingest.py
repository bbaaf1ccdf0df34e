"""The ingest stage: a corpus becomes a dataset of `.bin`/`.idx` shards.

The parent cuts files into blocks; workers parse and tokenize them; the parent writes the answers
in order. Memory is bounded by the blocks under way. What a dataset holds: `data-NNNNN.bin/.idx`,
`documents.parquet` (one row per document: where it came from), `tokenizer/`, and `rejects.jsonl`
if bad records were set aside.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError, RecordError
from contracts.files import user_path
from contracts.progress import Progress
from contracts.stage import Stage
from contracts.store import Workspace
from contracts.workspace import StoreAtWork
from preprocessing.config import IngestConfig
from preprocessing.ingestion.encoding import Damage, EncodingPlan, make_encoder
from preprocessing.ingestion.shards import REJECTS, UNFINISHED, ShardWriter, Tally
from preprocessing.ingestion.workers import InProcess, Pool, Processes
from preprocessing.reading.blocks import Block, Position
from preprocessing.reading.compression import detect_kind
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.pieces import file_blocks
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.sources import raw_source_files, recorded_path, source_files
from preprocessing.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer, tokenizer_files

IN_PROCESS_BYTES = 2**20
LINE_COUNTS = ("documents", "empty", "filtered", "rejected")


class EmptyDatasetError(InputError):
    """No record of the corpus gave a document."""


def ingest(settings: IngestConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Tokenize the corpus into `workspace.path`; return the dataset's numbers.

    Raises:
        ConfigError: Sources or tokenizer are missing, or the tokenizer lacks a token asked for.
        RecordError: A record is bad and `on_error` is "stop".
        DamagedStreamError: A file is truncated or damaged and `on_error` is "stop".
        EmptyDatasetError: No record gave a document.
    """
    try:
        return _ingest(settings, inputs, workspace)
    except (ConfigError, RecordError, DamagedStreamError, EmptyDatasetError):
        workspace.discard()
        raise


def _ingest(settings: IngestConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    folder = workspace.path
    tokenizer_path = _tokenizer_path(settings, inputs)
    tokenizer = load_tokenizer(tokenizer_path)
    plan = EncodingPlan(
        tokenizer=str(tokenizer_path),
        form=RecordFormat(settings.text_key, settings.subset_key, settings.invalid_unicode == "replace"),
        keep_empty=settings.keep_empty,
        eod_id=tokenizer.require_eod(settings.eod_token) if settings.append_eod else None,
        bos_id=tokenizer.require_bos() if settings.add_bos else None,
    )
    files = source_files(settings.sources, inputs, part=settings.corpus_part, stage="ingest")
    for file in files:
        detect_kind(file)  # a type that cannot be read is refused before any work
    total_bytes = sum(file.path.stat().st_size for file in files)
    writer = ShardWriter(
        folder,
        dtype=tokenizer.token_dtype,
        shard_tokens=settings.shard_tokens,
        stops_at_rejects=settings.on_error == "stop",
        is_resumed=workspace.is_resumed and (folder / UNFINISHED).is_dir(),
    )
    if writer.num_shards:
        workspace.progress.note(f"going on after {writer.num_shards} finished shards")
    try:
        with _pool(settings.workers, total_bytes, plan) as pool:
            blocks = _blocks(files, writer.position, plan.form, is_strict=settings.on_error == "stop")
            for block in pool.ordered(blocks):
                writer.write(block)
                if not isinstance(block, Damage):
                    read = block.file_bytes_read
                    _report(workspace.progress, writer.tally, files, block.end.piece, read, total_bytes)
        _refuse_empty(writer.tally, files)
        _refuse_lost_lines(writer.tally)
        writer.finish(files)
    except BaseException:
        writer.close()
        raise
    _copy_tokenizer(tokenizer_path, folder)
    _tell(workspace.progress, writer.tally, files)
    return _summary(settings, tokenizer, plan, writer, files, workspace.store)


def _tokenizer_path(settings: IngestConfig, inputs: Mapping[str, Artifact]) -> Path:
    if "tokenizer" in inputs:
        if settings.tokenizer is not None:
            raise ConfigError("ingest: both a tokenizer artifact and ingest.tokenizer are given. Keep one.")
        return inputs["tokenizer"].path
    if settings.tokenizer is None:
        raise ConfigError(
            "ingest: no tokenizer. Set ingest.tokenizer (--tokenizer PATH), or give a tokenizer artifact."
        )
    return user_path(settings.tokenizer)


def _pool(workers: int | None, total_bytes: int, plan: EncodingPlan) -> Pool:
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), total_bytes // IN_PROCESS_BYTES)
    return Processes(workers, make_encoder, (plan,)) if workers else InProcess(make_encoder, (plan,))


def _blocks(
    files: Sequence[SourceFile], start: Position, form: RecordFormat, *, is_strict: bool
) -> Iterator[Block | Damage]:
    for number in range(start.piece, len(files)):
        position = start if number == start.piece else Position(number)
        try:
            yield from file_blocks(files[number], position, form=form)
        except DamagedStreamError as error:
            if is_strict:
                raise
            yield Damage(files[number], number, error.reason, error.is_truncated)


def _report(
    progress: Progress, tally: Tally, files: Sequence[SourceFile], file: int, file_bytes: int, total_bytes: int
) -> None:
    done = sum(item.path.stat().st_size for item in files[:file]) if len(files) < 100 else 0
    progress.update(
        done + file_bytes,
        total=total_bytes if len(files) < 100 else None,
        unit="bytes",
        documents=tally.counts["documents"],
        tokens=tally.counts["tokens"],
    )


def _refuse_empty(tally: Tally, files: Sequence[SourceFile]) -> None:
    if tally.counts["documents"]:
        return
    first = next(iter(tally.examples.get("rejected", [])), None)
    why = f" First: {first['file']}, line {first['line']}: {first['reason']}." if first else ""
    damaged = "".join(f" {files[int(n)].name}: {item['reason']}." for n, item in tally.damaged.items())
    raise EmptyDatasetError(
        f"no record of {len(files)} files gave a document: {tally.counts['rejected']} rejected, "
        f"{tally.counts['empty']} empty.{why}{damaged} Check ingest.text_key (--text-key) and the sources."
    )


def _refuse_lost_lines(tally: Tally) -> None:
    for number, counts in tally.files.items():
        found = sum(counts[name] for name in LINE_COUNTS)
        if found != counts["lines"]:
            raise RuntimeError(f"file {number}: {counts['lines']} lines, but {found} accounted for; this is a defect")


def _tell(progress: Progress, tally: Tally, files: Sequence[SourceFile]) -> None:
    """Say what a user should not miss: damaged files, rejects, texts that do not survive the tokenizer."""
    for number, damage in tally.damaged.items():
        taken = tally.files[number]["lines"] if number in tally.files else 0
        progress.note(f"{files[int(number)].name}: {damage['reason']}; {taken} records were taken")
    if tally.counts["rejected"]:
        progress.note(f"{tally.counts['rejected']} bad records are listed in {REJECTS}")
    if tally.counts["round_trip_differs"]:
        first = tally.examples["round_trip_differs"][0]
        progress.note(
            f"{tally.counts['round_trip_differs']} of {tally.counts['round_trip_checked']} texts tried do not survive "
            f"encoding and decoding, first {files[first['file_number']].name}, line {first['line']}"
        )


def _copy_tokenizer(path: Path, folder: Path) -> None:
    files = tokenizer_files(path)
    (folder / "tokenizer").mkdir(exist_ok=True)
    for source in filter(None, (files.tokenizer, files.config)):
        target = folder / "tokenizer" / (TOKENIZER_FILE if source == files.tokenizer else source.name)
        shutil.copyfile(source, target)


def _summary(
    settings: IngestConfig,
    tokenizer: Tokenizer,
    plan: EncodingPlan,
    writer: ShardWriter,
    files: Sequence[SourceFile],
    store: StoreAtWork,
) -> dict[str, Any]:
    tally = writer.tally
    lines = sum(counts["lines"] for counts in tally.files.values())
    names = (*LINE_COUNTS, "tokens", "bytes")
    mended = ("replaced_characters", "replaced_records", "byte_order_marks", "special_tokens_in_text")
    differs = tally.examples.get("round_trip_differs", [])
    return {
        "lines": lines,
        **{name: tally.counts[name] for name in (*names, *mended)},
        "shards": writer.num_shards,
        "token_dtype": str(tokenizer.token_dtype),
        "vocab_size": tokenizer.vocab_size,
        "append_eod": settings.append_eod,
        "eod_id": plan.eod_id,
        "eod_token": None if plan.eod_id is None else tokenizer.token(plan.eod_id),
        "add_bos": settings.add_bos,
        "bos_id": plan.bos_id,
        "subsets": {name: dict(counts) for name, counts in sorted(tally.subsets.items())},
        "round_trip": {
            "checked": tally.counts["round_trip_checked"],
            "differs": tally.counts["round_trip_differs"],
            "examples": [{"file": files[item["file_number"]].name, "line": item["line"]} for item in differs],
        },
        "sources": [
            {"name": file.name, "path": recorded_path(file.path, store), **_file_counts(tally, number, names)}
            for number, file in enumerate(files)
        ],
        "damaged_files": len(tally.damaged),
    }


def _file_counts(tally: Tally, number: int, names: Sequence[str]) -> dict[str, Any]:
    counts: Mapping[str, int] = tally.files.get(str(number), {})
    result: dict[str, Any] = {name: counts.get(name, 0) for name in ("lines", *names)}
    if str(number) in tally.damaged:
        result["damaged"] = tally.damaged[str(number)]
    return result


def _raw_files(settings: IngestConfig) -> dict[str, Path]:
    files: dict[str, Path] = {}
    if settings.sources:
        files |= raw_source_files(settings.sources, part=settings.corpus_part, stage="ingest")
    if settings.tokenizer is not None:
        found = tokenizer_files(settings.tokenizer)
        files["tokenizer/tokenizer.json"] = found.tokenizer
        if found.config is not None:
            files["tokenizer/tokenizer_config.json"] = found.config
    return files


INGEST = Stage(
    name="ingest",
    version=1,
    kind="dataset",
    settings=IngestConfig,
    work=ingest,
    raw_files=_raw_files,
)
