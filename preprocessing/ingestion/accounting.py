"""What became of every line: the checks before a dataset is put together, and its summary.

lines = documents + empty + filtered + rejected, for each file and in total.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from contracts.errors import InputError
from contracts.progress import Progress
from contracts.workspace import StoreAtWork
from preprocessing.config import IngestConfig
from preprocessing.ingestion.encoding import NO_SUBSET, EncodingPlan
from preprocessing.ingestion.shards import REJECTS
from preprocessing.ingestion.tally import LINE_COUNTS, Tally
from preprocessing.reading.recorded import recorded_source
from preprocessing.reading.source_file import SourceFile
from preprocessing.tokenization.tokenizer import Tokenizer

_MENDED = ("replaced_characters", "replaced_records", "byte_order_marks", "special_tokens_in_text")


class EmptyDatasetError(InputError):
    """No record of the corpus gave a document."""


class TooManyRejectsError(InputError):
    """More records are bad than `max_rejects` allows."""


def check_lines(settings: IngestConfig, tally: Tally, files: Sequence[SourceFile]) -> None:
    """Make sure that the counts may become a dataset.

    Raises:
        TooManyRejectsError: More records are bad than the settings allow.
        EmptyDatasetError: There is no document.
        RuntimeError: A line is not accounted for.
    """
    refuse_too_many_rejects(settings, tally.counts["rejected"], lines=num_lines(tally), first=_first_reject(tally))
    _refuse_empty(settings, tally, files)
    _refuse_absent_subsets(settings, tally)
    for number, counts in tally.places.items():
        found = sum(counts[name] for name in LINE_COUNTS)
        if found != counts["lines"]:
            raise RuntimeError(f"file {number}: {counts['lines']} lines, but {found} accounted for; this is a defect")


def num_lines(tally: Tally) -> int:
    return sum(counts["lines"] for counts in tally.places.values())


def refuse_too_many_rejects(settings: IngestConfig, rejected: int, *, lines: int | None, first: str = "") -> None:
    """Refuse more bad records than `max_rejects`.

    Args:
        lines: Of the whole corpus; None: not known yet, so that only a count can be judged.

    Raises:
        TooManyRejectsError: There are too many.
    """
    limit = settings.max_rejects
    if limit is None:
        return
    if limit >= 1 or limit == 0:
        is_too_many, allowed = rejected > limit, f"{limit:g}"
    elif lines is None:
        return
    else:
        is_too_many, allowed = rejected > limit * lines, f"{limit:g} of {lines} lines"
    if is_too_many:
        raise TooManyRejectsError(
            f"{rejected} bad records, but ingest.max_rejects (--max-rejects) allows {allowed}.{first} "
            "Mend the records, or raise max_rejects; on_error: stop names the first bad record."
        )


def _first_reject(tally: Tally) -> str:
    first = next(iter(tally.examples.get("rejected", [])), None)
    return f" First: {first['file']}, line {first['line']}: {first['reason']}." if first else ""


def _refuse_empty(settings: IngestConfig, tally: Tally, files: Sequence[SourceFile]) -> None:
    if tally.counts["documents"]:
        return
    damaged = "".join(f" {files[int(n)].name}: {item['reason']}." for n, item in tally.damaged.items())
    cure = "Check ingest.text_key (--text-key) and the sources."
    if tally.counts["filtered"]:
        most = ", ".join(f"{reason} ({count})" for reason, count in tally.filtered.most_common(5))
        damaged += f" {tally.counts['filtered']} filtered: {most}."
        if settings.subsets:
            cure = "Check ingest.subsets (--subset), ingest.subset_key (--subset-key) and the sources."
    raise EmptyDatasetError(
        f"no record of {len(files)} files gave a document: {num_lines(tally)} lines, "
        f"{tally.counts['rejected']} rejected, {tally.counts['empty']} empty.{_first_reject(tally)}{damaged} {cure}"
    )


def _refuse_absent_subsets(settings: IngestConfig, tally: Tally) -> None:
    absent = [name for name in settings.subsets if name not in tally.subsets]
    if absent:
        others = [reason.removeprefix("subset ") for reason in tally.filtered if reason.startswith("subset ")]
        found = ", ".join(sorted({*tally.subsets, *others})) or "none"
        raise EmptyDatasetError(
            f"ingest.subsets: no document is of the subset {', '.join(map(repr, absent))}. Subsets in the sources: "
            f"{found[:500]}. Mend the name, or leave it out."
        )


def tell_findings(settings: IngestConfig, progress: Progress, tally: Tally, files: Sequence[SourceFile]) -> None:
    """Say what a user should not miss: damaged files, rejects, texts that do not survive the tokenizer."""
    for number, damage in tally.damaged.items():
        taken = tally.places[number]["lines"] if number in tally.places else 0
        progress.note(f"{files[int(number)].name}: {damage['reason']}; {taken} records were taken")
    for name, count in Counter((str(file.place), file.first_byte) for file in files).items():
        if count > 1:
            progress.note(f"{name[0]} is given {count} times, so its documents are there {count} times")
    if set(tally.subsets) == {NO_SUBSET} and settings.subset_key != IngestConfig().subset_key:
        progress.note(f"no record has a subset under {settings.subset_key!r} (ingest.subset_key)")
    if tally.counts["filtered"]:
        most = ", ".join(f"{reason} ({count})" for reason, count in tally.filtered.most_common(5))
        progress.note(f"{tally.counts['filtered']} records were filtered: {most}")
    if tally.counts["rejected"]:
        progress.note(f"{tally.counts['rejected']} bad records are listed in {REJECTS}")
    if tally.counts["round_trip_differs"]:
        first = tally.examples["round_trip_differs"][0]
        progress.note(
            f"{tally.counts['round_trip_differs']} of {tally.counts['round_trip_checked']} texts tried do not survive "
            f"encoding and decoding, first {files[first['file_number']].name}, line {first['line']}"
        )


def summarize(
    settings: IngestConfig,
    tokenizer: Tokenizer,
    plan: EncodingPlan,
    tally: Tally,
    files: Sequence[SourceFile],
    store: StoreAtWork,
) -> dict[str, Any]:
    """Return the dataset's numbers, in total, by subset and by source."""
    names = (*LINE_COUNTS, "tokens", "bytes")
    differs = tally.examples.get("round_trip_differs", [])
    return {
        "lines": num_lines(tally),
        **{name: tally.counts[name] for name in (*names, *_MENDED)},
        "token_dtype": str(tokenizer.token_dtype),
        "vocab_size": tokenizer.vocab_size,
        "append_eod": settings.append_eod,
        "eod_id": plan.eod_id,
        "eod_token": None if plan.eod_id is None else tokenizer.token(plan.eod_id),
        "add_bos": settings.add_bos,
        "bos_id": plan.bos_id,
        "subsets": {name: dict(counts) for name, counts in sorted(tally.subsets.items())},
        "filtered_by": dict(sorted(tally.filtered.items())),
        "round_trip": {
            "checked": tally.counts["round_trip_checked"],
            "differs": tally.counts["round_trip_differs"],
            "examples": [{"file": files[item["file_number"]].name, "line": item["line"]} for item in differs],
        },
        "sources": [
            {"name": file.name, "path": recorded_source(file, store), **_file_counts(tally, number, names)}
            for number, file in enumerate(files)
        ],
        "damaged_files": len(tally.damaged),
    }


def _file_counts(tally: Tally, number: int, names: Sequence[str]) -> dict[str, Any]:
    counts: Mapping[str, int] = tally.places.get(str(number), {})
    result: dict[str, Any] = {name: counts.get(name, 0) for name in ("lines", *names)}
    if str(number) in tally.damaged:
        result["damaged"] = tally.damaged[str(number)]
    return result
