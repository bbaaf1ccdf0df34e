"""The clean stage: a corpus becomes a smaller one, every document that was left out listed.

Two passes over the parts of the corpus, and a step between them that sees all documents:

1. each document is judged by itself: length, quality, language, evaluation sets;
2. of equal and of similar documents the first stays;
3. what stays is written in Pile form, personal data masked.

Writes `train/NNNNN.jsonl.zst`, `dropped.parquet`, and `rejects.jsonl` if bad records were set
aside; `heldout/` of a corpus artifact is passed through as it is. The bytes do not depend on workers.
"""

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.digests import sha256_of
from contracts.errors import ConfigError, InputError, RecordError
from contracts.stage import Stage
from contracts.store import Workspace
from preprocessing.cleaning.config import CleanConfig
from preprocessing.cleaning.contamination import KEYS, EvaluationIndex, evaluation_keys
from preprocessing.cleaning.examination import EXAMINE, ExaminedPart
from preprocessing.cleaning.fates import decide
from preprocessing.cleaning.job import CleanJob, run_pass
from preprocessing.cleaning.listing import Account, list_documents, list_rejects
from preprocessing.cleaning.rules import STEPS, Rules
from preprocessing.cleaning.signatures import Signer
from preprocessing.cleaning.writing import WRITE, WrittenPart
from preprocessing.ingestion.ingest import IN_PROCESS_BYTES
from preprocessing.ingestion.parts import UNFINISHED, give_up, kept_plan
from preprocessing.ingestion.shards import REJECTS
from preprocessing.ingestion.tally import LINE_COUNTS, Bases, Tally, bases_of, joined
from preprocessing.reading.damage import DamagedStreamError, ForeignFileError
from preprocessing.reading.recorded import recorded_source
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.sources import (
    SourceSettings,
    corpus_files,
    expand_sources,
    raw_source_files,
    raw_source_identities,
    source_files,
)

HELDOUT = "heldout"
MASKED = ("masked_documents", "masked_emails", "masked_ip_addresses")


class EmptyCorpusError(InputError):
    """No document is left, or more records are bad than the settings allow."""


REFUSALS = (ConfigError, RecordError, DamagedStreamError, ForeignFileError, EmptyCorpusError)
"""After these nothing is kept: the corpus or the settings must change first."""


def clean(settings: CleanConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Clean the corpus into `workspace.path`; return counts.

    Raises:
        ConfigError: No step is asked for, sources are missing, or a package is.
        RecordError: A record is bad and `on_error` is "stop".
        DamagedStreamError: A file is truncated or damaged and `on_error` is "stop".
        EmptyCorpusError: No document is left, or more records are bad than `max_rejects`.
    """
    if (summary := workspace.kept_result()) is not None:
        shutil.rmtree(workspace.path / UNFINISHED, ignore_errors=True)
        return summary
    try:
        return _clean(settings, inputs, workspace)
    except REFUSALS:
        give_up(workspace)
        raise


def _clean(settings: CleanConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    job = _prepared(settings, inputs, workspace)
    progress = workspace.progress
    workers = settings.workers
    if workers is None:
        total_bytes = sum(part.size_bytes for part in job.parts)
        workers = min(len(os.sched_getaffinity(0)), total_bytes // IN_PROCESS_BYTES)
    run_pass(EXAMINE, job, workers=workers, progress=progress, passes=(1, 2))
    parts = [ExaminedPart.read(job.part_folder(number)) for number in range(len(job.parts))]
    tallies = [part.tally for part in parts]
    bases = bases_of((part.pieces, tally) for part, tally in zip(job.parts, tallies, strict=True))
    tally = joined(tallies, bases)
    _refuse_too_many_rejects(settings, tally)
    _refuse_empty(job, tally, sum(len(part.digests) for part in parts))
    decide(job, parts, bases, progress)
    run_pass(WRITE, job, workers=workers, progress=progress, passes=(2, 2))
    return _finish(job, parts, bases, tally, inputs, workspace)


def _prepared(settings: CleanConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> CleanJob:
    """List the files, divide them into parts, and index the evaluation sets, or take what a killed run has done."""
    if not settings.has_steps:
        raise ConfigError(
            "clean: no step is asked for. Set one or more of clean.quality, languages, decontaminate, exact, minhash, "
            "mask_personal_data, min_characters, max_characters (shardline clean --help)."
        )
    files = source_files(settings.sources, inputs, _source_settings(settings))
    form = RecordFormat(
        settings.text_key,
        settings.subset_key,
        content=settings.format,
        text_unit=settings.text_unit,
        checked_only=settings.on_error == "quarantine",
    )
    folder = workspace.path.absolute()
    parts = kept_plan(folder, files, part_bytes=settings.part_bytes, form=form, may_begin=True)
    names = _indexed_sets(settings, inputs, form, folder / UNFINISHED)
    job = CleanJob(folder, tuple(files), parts, settings, form, names)
    # A missing package or unknown language is said here, before workers start.
    Rules(settings, job.unfinished, names)
    if settings.minhash is not None:
        Signer(settings.minhash)
    return job


def _indexed_sets(
    settings: CleanConfig, inputs: Mapping[str, Artifact], form: RecordFormat, folder: Path
) -> tuple[str, ...]:
    """Index the n-grams of the evaluation sets; return their names."""
    sets = [(file, settings.decontaminate_keys) for file in _evaluation_files(settings)]
    sets += [(file, ("text",)) for file in _heldout_files(settings, inputs)]
    names = tuple(file.name for file, _ in sets)
    if not sets or (folder / KEYS).exists():
        return names
    found = []
    for file, keys in sets:
        found.append(evaluation_keys(file, keys, form, settings.ngram))
        if not len(found[-1]) and not file.name.startswith(f"{HELDOUT}/"):
            raise ConfigError(
                f"clean.decontaminate: {file.name} has no text under {', '.join(keys)}. "
                "Set clean.decontaminate_keys to the keys that hold its questions, passages and answers."
            )
    index = EvaluationIndex.of(found)
    if not len(index.keys):
        return ()
    index.save(folder)
    return names


def _evaluation_files(settings: CleanConfig) -> list[SourceFile]:
    return expand_sources(settings.decontaminate, _evaluation_settings(settings)) if settings.decontaminate else []


def _heldout_files(settings: CleanConfig, inputs: Mapping[str, Artifact]) -> list[SourceFile]:
    if not (settings.decontaminate if settings.decontaminate_heldout is None else settings.decontaminate_heldout):
        return []
    corpus = inputs.get("corpus")
    if corpus is None or not any(entry.path.startswith(f"{HELDOUT}/") for entry in corpus.manifest.files):
        if settings.decontaminate_heldout:
            raise ConfigError(
                "clean.decontaminate_heldout is true, but there is no corpus artifact with a held-out part. "
                "Leave it out, or name the evaluation sets in clean.decontaminate."
            )
        return []
    return corpus_files(corpus, HELDOUT)


def _refuse_too_many_rejects(settings: CleanConfig, tally: Tally) -> None:
    limit, rejected = settings.max_rejects, tally.counts["rejected"]
    if limit is None:
        return
    lines = _num_lines(tally)
    allowed = limit if limit >= 1 else limit * lines
    if rejected > allowed:
        raise EmptyCorpusError(
            f"{rejected} bad records of {lines}, but clean.max_rejects (--max-rejects) allows {limit:g}."
            f"{_first_reject(tally)} Mend the records, or raise max_rejects."
        )


def _refuse_empty(job: CleanJob, tally: Tally, passed: int) -> None:
    if passed:
        return
    most = ", ".join(f"{reason} ({count})" for reason, count in tally.filtered.most_common(5))
    damaged = "".join(f" {job.files[int(n)].name}: {item['reason']}." for n, item in tally.damaged.items())
    raise EmptyCorpusError(
        f"no document of {len(job.files)} files is left: {tally.counts['filtered']} filtered ({most or 'none'}), "
        f"{tally.counts['rejected']} rejected, {tally.counts['empty']} empty.{_first_reject(tally)}{damaged} "
        "Check clean.text_key (--text-key), the sources, and whether the rules suit this text."
    )


def _first_reject(tally: Tally) -> str:
    first = next(iter(tally.examples.get("rejected", [])), None)
    return f" First: {first['file']}, line {first['line']}: {first['reason']}." if first else ""


def _num_lines(tally: Tally) -> int:
    return sum(counts["lines"] for counts in tally.places.values())


def _finish(
    job: CleanJob,
    parts: Sequence[ExaminedPart],
    bases: Sequence[Bases],
    tally: Tally,
    inputs: Mapping[str, Artifact],
    workspace: Workspace,
) -> dict[str, Any]:
    account = list_documents(job, parts, bases, tally)
    if tally.counts["rejected"]:
        list_rejects(job, bases)
    for file, counts in tally.places.items():
        if sum(counts[name] for name in LINE_COUNTS) != counts["lines"]:
            raise RuntimeError(f"file {file}: {dict(counts)} do not add up; this is a defect")
    written = [WrittenPart.read(job, number) for number in range(len(job.parts))]
    for number, part in enumerate(written):
        if part.counts["documents"]:
            workspace.known_digests[f"train/{number:05d}.jsonl.zst"] = part.sha256
    heldout = _pass_heldout_through(inputs.get("corpus"), workspace)
    summary = _summary(job, account, written, heldout, workspace)
    _tell(account, workspace)
    workspace.keep_result(summary)
    shutil.rmtree(job.unfinished)
    return summary


def _pass_heldout_through(corpus: Artifact | None, workspace: Workspace) -> Mapping[str, Any]:
    """Copy the held-out part of the corpus; return its counts by subset."""
    if corpus is None:
        return {}
    for entry in corpus.manifest.files:
        if entry.path.startswith(f"{HELDOUT}/"):
            target = workspace.path / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f"{target.name}.tmp")
            shutil.copyfile(corpus.path / entry.path, temporary)
            if sha256_of(temporary) != entry.sha256:
                raise InputError(f"{corpus.path / entry.path}: is not what its manifest says. Check {corpus.path}.")
            temporary.replace(target)
            workspace.known_digests[entry.path] = entry.sha256
    found: Mapping[str, Any] = corpus.summary.get("subsets", {}).get(HELDOUT, {})
    return found


def _summary(
    job: CleanJob,
    account: Account,
    written: Sequence[WrittenPart],
    heldout: Mapping[str, Any],
    workspace: Workspace,
) -> dict[str, Any]:
    tally = account.tally
    counts: Counter[str] = Counter()
    train: dict[str, Counter[str]] = {}
    for part in written:
        counts.update(part.counts)
        for name, numbers in part.subsets.items():
            train.setdefault(name, Counter()).update(numbers)
    subsets = {"train": train, HELDOUT: heldout}
    return {
        "lines": _num_lines(tally),
        **{name: tally.counts[name] for name in LINE_COUNTS},
        "bytes": counts["bytes"],
        **{name: counts[name] for name in MASKED if job.settings.mask_personal_data},
        "filtered_by": dict(sorted(tally.filtered.items())),
        "dropped": {step: dict(account.dropped[step].most_common()) for step in STEPS if step in account.dropped},
        "dropped_subsets": {name: dict(steps) for name, steps in sorted(account.subsets.items())},
        "subsets": {part: {name: dict(n) for name, n in sorted(of.items())} for part, of in subsets.items()},
        **{f"{part}_documents": sum(n["documents"] for n in of.values()) for part, of in subsets.items()},
        **{f"{part}_bytes": sum(n["bytes"] for n in of.values()) for part, of in subsets.items()},
        "sources": [
            {"name": file.name, "path": recorded_source(file, workspace.store), **_of_file(tally, number)}
            for number, file in enumerate(job.files)
        ],
        "damaged_files": len(tally.damaged),
    }


def _of_file(tally: Tally, number: int) -> dict[str, Any]:
    counts: Mapping[str, int] = tally.places.get(str(number), {})
    result: dict[str, Any] = {name: counts.get(name, 0) for name in ("lines", *LINE_COUNTS)}
    return result | ({"damaged": tally.damaged[str(number)]} if str(number) in tally.damaged else {})


def _tell(account: Account, workspace: Workspace) -> None:
    for step in STEPS:
        if step in account.dropped:
            reasons = account.dropped[step].most_common(3)
            most = ", ".join(f"{reason} ({count})" for reason, count in reasons)
            workspace.progress.note(f"{step}: {sum(account.dropped[step].values())} documents left out: {most}")
    if account.tally.counts["rejected"]:
        workspace.progress.note(f"{account.tally.counts['rejected']} bad records are listed in {REJECTS}")


def _source_settings(settings: CleanConfig) -> SourceSettings:
    return SourceSettings(setting="clean.sources", is_text_wanted=settings.format == "text", preset=settings.preset)


def _evaluation_settings(settings: CleanConfig) -> SourceSettings:
    return SourceSettings(part=HELDOUT, setting="clean.decontaminate", is_text_wanted=settings.format == "text")


def _raw_files(settings: CleanConfig) -> dict[str, Path]:
    files = raw_source_files(settings.sources, _source_settings(settings))
    sets = raw_source_files(settings.decontaminate, _evaluation_settings(settings))
    return files | {f"evaluation/{name}": path for name, path in sets.items()}


def _raw(settings: CleanConfig) -> dict[str, str]:
    files = raw_source_identities(settings.sources, _source_settings(settings))
    sets = raw_source_identities(settings.decontaminate, _evaluation_settings(settings))
    return files | {f"evaluation/{name}": digest for name, digest in sets.items()}


CLEAN = Stage(
    name="clean",
    version=1,
    kind="corpus",
    settings=CleanConfig,
    work=clean,
    raw_files=_raw_files,
    raw=_raw,
    refuses_changes=True,
)
