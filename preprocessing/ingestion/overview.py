"""How far all parts of a job are together: for the progress bar, and to stop early at too many bad records."""

import contextlib
import time
from collections.abc import Iterable

from contracts.progress import Progress
from preprocessing.config import IngestConfig
from preprocessing.ingestion.accounting import refuse_too_many_rejects
from preprocessing.ingestion.parts import IngestJob, PartProgress, PartsAtWork, read_progress
from preprocessing.ingestion.shards import read_state

_SHARE_OF_TIME = 0.05  # spent on reading reports: thousands of small files on a network disk take a while


class Overview:
    """Adds up the progress of parts.

    Args:
        numbers: The parts to look at.
    """

    def __init__(self, job: IngestJob, numbers: Iterable[int], settings: IngestConfig, progress: Progress) -> None:
        self._job = job
        self._settings = settings
        self._progress = progress
        self._reports: dict[int, PartProgress] = {}
        self._running: set[int] = set()
        self._total = 0
        self._shards = 0
        self._pause_until_s = 0.0
        for number in numbers:
            state = read_state(job.part_folder(number))
            self._shards += state.shards
            self._total += job.parts[number].size_bytes
            if state.is_done:
                self._finished(number)
            else:
                self._running.add(number)

    def tell_resumed(self) -> None:
        """Say how much of an unfinished build is there already."""
        if self._shards:
            self._progress.note(f"going on after {self._shards} finished shards")

    def follow(self, running: PartsAtWork) -> None:
        """Watch parts that are run until all are done.

        Raises:
            TooManyRejectsError: More records are bad than the settings allow, whatever else comes.
        """
        with contextlib.closing(running):  # the parts must have stopped before anything is thrown away
            for number in running:
                if number is None:
                    self._read_reports()
                else:
                    self._finished(number)
                self._report()

    def tell(self, number: int, progress: PartProgress) -> None:
        """Take the report of a part that runs in this process."""
        self._reports[number] = progress
        self._report()

    def _finished(self, number: int) -> None:
        counts = read_state(self._job.part_folder(number)).tally.counts
        size_bytes = self._job.parts[number].size_bytes
        self._reports[number] = PartProgress(size_bytes, counts["documents"], counts["tokens"], counts["rejected"])
        self._running.discard(number)

    def _read_reports(self) -> None:
        started_s = time.monotonic()
        if started_s < self._pause_until_s:
            return
        for number in self._running:
            self._reports[number] = read_progress(self._job.part_folder(number))
        now_s = time.monotonic()
        self._pause_until_s = now_s + (now_s - started_s) / _SHARE_OF_TIME

    def _report(self) -> None:
        reports = self._reports.values()
        refuse_too_many_rejects(self._settings, sum(report.rejected for report in reports), lines=None)
        self._progress.update(
            sum(report.bytes for report in reports),
            total=self._total,
            unit="bytes",
            documents=sum(report.documents for report in reports),
            tokens=sum(report.tokens for report in reports),
        )
