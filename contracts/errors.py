"""Errors a user can cause. Each message says what was wrong, where, and the cure; no traceback is shown.

Exit codes of the command line: 1 failed, 2 bad usage or configuration, 4 locked by another run.
"""


class ShardlineError(Exception):
    """A failure that the user can understand and mend; the command line prints its text alone."""

    exit_code = 1


class ConfigError(ShardlineError):
    """A setting, flag or file name is wrong. Raised before any work starts."""

    exit_code = 2


class InputError(ShardlineError):
    """Data from outside is damaged, truncated or not what it claims to be."""


class RecordError(InputError):
    """One record of a corpus is bad.

    Args:
        file: The file as the user named it.
        line: 1-based line (or row) number.
        reason: What is wrong with it, and what was found instead.
    """

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(
            f"{file}, line {line}: {reason}. Mend the record, or set on_error to quarantine "
            "(--on-error quarantine for corpus, clean, tokenizer and ingest) to set bad records aside and go on."
        )
        self.file = file
        self.line = line
        self.reason = reason

    def __reduce__(self) -> tuple[type["RecordError"], tuple[str, int, str]]:
        # Worker processes hand their exceptions to the parent as pickles.
        return type(self), (self.file, self.line, self.reason)


class LockedError(ShardlineError):
    """Another run holds the lease on an artifact."""

    exit_code = 4
