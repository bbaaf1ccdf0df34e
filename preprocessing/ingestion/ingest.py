"""The ingest stage: a corpus becomes a dataset of `.bin`/`.idx` shards.

Source files are divided into parts; each part is done by itself, here, on other machines or on a
cluster; the finished parts are put together. What a dataset holds: `data-NNNNN.bin/.idx`,
`documents.parquet` (one row per document: where it came from), `tokenizer/`, and `rejects.jsonl`
if bad records were set aside.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.errors import ConfigError, RecordError
from contracts.files import user_path
from contracts.progress import Progress
from contracts.stage import Stage
from contracts.store import Workspace
from preprocessing.config import IngestConfig
from preprocessing.ingestion.accounting import (
    EmptyDatasetError,
    TooManyRejectsError,
    check_lines,
    summarize,
    tell_findings,
)
from preprocessing.ingestion.assembly import assemble, finished_parts
from preprocessing.ingestion.encoding import EncodingPlan
from preprocessing.ingestion.engine_choice import (
    bar_engine,
    chosen_engine,
    drop_barred_parts,
    engine_provenance,
    spread_texts,
)
from preprocessing.ingestion.executors import run_here
from preprocessing.ingestion.overview import Overview
from preprocessing.ingestion.parts import IngestJob, PartsAtWork, close_build, give_up, kept_plan, refuse_if_over
from preprocessing.reading.damage import DamagedStreamError, ForeignFileError
from preprocessing.reading.pile import compare_with_published, doubts_about
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.sources import SourceSettings, raw_source_files, raw_source_identities, source_files
from preprocessing.reading.turns import TurnFormat
from preprocessing.tokenization.audit import EngineRejectedError
from preprocessing.tokenization.loading import load_tokenizer, tokenizer_files
from preprocessing.tokenization.tokenizer import Tokenizer, keep_tokenizer

IN_PROCESS_BYTES = 2**20
REFUSALS = (ConfigError, RecordError, DamagedStreamError, ForeignFileError, EmptyDatasetError, TooManyRejectsError)
"""After these nothing is kept: the corpus or the settings must change first."""


@dataclass(frozen=True)
class Prepared:
    """A job with the tokenizer it uses."""

    job: IngestJob
    tokenizer: Tokenizer


def ingest(settings: IngestConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Tokenize the corpus into `workspace.path`; return the dataset's numbers.

    Raises:
        ConfigError: Sources or tokenizer are missing, or the tokenizer lacks a token asked for.
        RecordError: A record is bad and `on_error` is "stop".
        DamagedStreamError: A file is truncated or damaged and `on_error` is "stop".
        EmptyDatasetError: No record gave a document.
        TooManyRejectsError: More records are bad than `max_rejects`.
    """
    if (summary := workspace.kept_result()) is not None:
        close_build(workspace.path)
        return summary
    try:
        prepared = do_parts(settings, inputs, workspace.path, progress=workspace.progress)
        return _finish(settings, prepared, workspace)
    except REFUSALS:
        give_up(workspace)
        raise


def do_parts(
    settings: IngestConfig,
    inputs: Mapping[str, Artifact],
    folder: Path,
    *,
    progress: Progress,
    rank: int = 0,
    world: int = 1,
    may_begin: bool = True,
) -> Prepared:
    """Do what is left of the parts `rank`, `rank + world`, and so on.

    They are done again where an engine is found wrong, until every part stands by a good engine.

    Args:
        may_begin: Divide the files into parts if that was not done; only under the lease on `folder`.

    Raises:
        BuildOverError: Another process completed the build, or gave it up.
    """
    while True:
        prepared = prepare(settings, inputs, folder, progress=progress, may_begin=may_begin)
        job = prepared.job
        mine = range(rank, len(job.parts), world)
        drop_barred_parts(job)
        left = [number for number in job.unfinished_parts() if number in mine]
        overview = Overview(job, mine, settings, progress)
        overview.tell_resumed()
        try:
            if left:
                overview.follow(run_parts(job, left, settings, overview))
        except EngineRejectedError as error:
            bar_engine(job.folder, error, progress)
            continue
        drop_barred_parts(job)  # another machine may have found an engine wrong
        if not set(mine) & set(job.unfinished_parts()):
            return prepared


def begin(settings: IngestConfig, inputs: Mapping[str, Artifact], folder: Path) -> None:
    """Divide the files into parts, if that was not done, for processes that do them together; under the lease.

    Raises:
        ConfigError: Sources are missing.
        InputError: A file is of a type that cannot be read.
    """
    files = source_files(settings.sources, inputs, _source_settings(settings))
    kept_plan(folder, files, part_bytes=settings.part_bytes, form=_record_format(settings), may_begin=True)


def prepare(
    settings: IngestConfig,
    inputs: Mapping[str, Artifact],
    folder: Path,
    *,
    progress: Progress,
    may_begin: bool = True,
) -> Prepared:
    """Load the tokenizer, list the files and divide them into parts, or take the parts of a build that was begun.

    The engine is chosen here, by an audit on texts spread over the corpus.

    Raises:
        ConfigError: Sources or tokenizer are missing, or the tokenizer lacks a token asked for.
        InputError: A file is of a type that cannot be read.
    """
    if not may_begin:
        refuse_if_over(folder)
    tokenizer_path = _tokenizer_path(settings, inputs)
    tokenizer = load_tokenizer(tokenizer_path)
    encoding = EncodingPlan(
        tokenizer=str(keep_tokenizer(tokenizer, folder.absolute())),
        form=_record_format(settings),
        keep_empty=settings.keep_empty,
        eod_id=tokenizer.require_eod(settings.eod_token) if settings.append_eod else None,
        bos_id=tokenizer.require_bos() if settings.add_bos else None,
        subsets=frozenset(settings.subsets),
        sentences=settings.sentences,
    )
    files = source_files(settings.sources, inputs, _source_settings(settings))
    job = IngestJob(
        folder=folder.absolute(),
        files=tuple(files),
        parts=kept_plan(folder, files, part_bytes=settings.part_bytes, form=encoding.form, may_begin=may_begin),
        encoding=encoding,
        dtype=tokenizer.token_dtype.str,
        shard_tokens=settings.shard_tokens,
        stops_at_rejects=settings.on_error == "stop",
    )
    if numbers := job.unfinished_parts():
        engine = chosen_engine(
            settings.engine,
            tokenizer,
            partial(spread_texts, job.files, job.parts, encoding.form),
            size_bytes=sum(job.parts[number].size_bytes for number in numbers),
            folder=job.folder,
            progress=progress,
        )
        job = replace(job, encoding=replace(encoding, engine=engine))
    return Prepared(job, tokenizer)


def run_parts(job: IngestJob, numbers: Sequence[int], settings: IngestConfig, overview: Overview) -> PartsAtWork:
    """Do the parts with the executor of the settings; yield each when it is done, and None now and then.

    Raises:
        ConfigError: The executor is not installed, or its cluster does not answer.
    """
    lonely = next((file for file in job.files if file.is_in_this_process_only), None)
    if lonely is not None and settings.executor != "local":
        raise ConfigError(
            f"{lonely.place} is in the memory of this process, where a cluster cannot read it. "
            "Set ingest.executor to local, or put the file on a disk that all machines see."
        )
    if settings.executor == "ray":
        from preprocessing.ingestion.ray_executor import run_on_ray

        return run_on_ray(job, numbers, cluster=settings.cluster, workers=settings.workers)
    if settings.executor == "dask":
        from preprocessing.ingestion.dask_executor import run_on_dask

        return run_on_dask(job, numbers, cluster=settings.cluster, workers=settings.workers)
    workers = settings.workers
    if workers is None:
        total_bytes = sum(job.parts[number].size_bytes for number in numbers)
        workers = min(len(os.sched_getaffinity(0)), total_bytes // IN_PROCESS_BYTES)
    return run_here(job, numbers, workers=workers, tell=overview.tell)


def _finish(settings: IngestConfig, prepared: Prepared, workspace: Workspace) -> dict[str, Any]:
    job = prepared.job
    parts = finished_parts(job)
    check_lines(settings, parts.tally, job.files)
    workspace.known_digests.update(assemble(job, parts))
    tell_findings(settings, workspace.progress, parts.tally, job.files)
    summary = summarize(settings, prepared.tokenizer, job.encoding, parts.tally, job.files, workspace.store)
    summary["shards"] = parts.num_shards
    if settings.preset == "pile":
        summary["published"] = compare_with_published(summary["subsets"])
        for doubt in doubts_about(summary["subsets"]):
            workspace.progress.note(f"the Pile: {doubt}")
    summary["engines"] = engine_provenance(job.folder, parts.states)
    # From here on a killed run is published by the next one without the states of the parts.
    workspace.keep_result(summary)
    close_build(job.folder)
    return summary


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


def _record_format(settings: IngestConfig) -> RecordFormat:
    replaces_invalid = settings.invalid_unicode == "replace"
    return RecordFormat(
        settings.text_key,
        settings.subset_key,
        replaces_invalid,
        settings.format,
        settings.text_unit,
        checked_only=settings.on_error == "quarantine",
        turns=None if settings.turns is None else TurnFormat(**settings.turns.model_dump()),
    )


def _source_settings(settings: IngestConfig) -> SourceSettings:
    return SourceSettings(
        part=settings.corpus_part,
        setting="ingest.sources",
        is_text_wanted=settings.format == "text",
        preset=settings.preset,
    )


def _raw(settings: IngestConfig) -> dict[str, str]:
    return raw_source_identities(settings.sources, _source_settings(settings))


def _raw_files(settings: IngestConfig) -> dict[str, Path]:
    files = raw_source_files(settings.sources, _source_settings(settings))
    if settings.tokenizer is not None:
        files |= {f"tokenizer/{name}": path for name, path in tokenizer_files(settings.tokenizer).items()}
    return files


INGEST = Stage(
    name="ingest",
    version=2,
    kind="dataset",
    settings=IngestConfig,
    work=ingest,
    raw_files=_raw_files,
    raw=_raw,
    refuses_changes=True,
)
