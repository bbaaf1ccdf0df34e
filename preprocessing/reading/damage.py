"""The errors of files that are not whole, or not of a form that is read."""

from contracts.errors import InputError


class ForeignFileError(InputError):
    """A file is of a form that cannot be read here."""


class DamagedStreamError(InputError):
    """A file ends early or holds bytes that cannot be right.

    Args:
        file: The file as the user named it.
        reason: What is wrong, and at which byte of the file.
        is_truncated: The file ends early, as after an interrupted copy.
        checked_bytes: Decompressed bytes before it of members and frames that were whole, where that is known.
    """

    def __init__(self, file: str, reason: str, is_truncated: bool, checked_bytes: int | None = None) -> None:
        super().__init__(f"{file}: {reason}.")
        self.checked_bytes = checked_bytes
        self.file = file
        self.reason = reason
        self.is_truncated = is_truncated

    def __reduce__(self) -> tuple[type["DamagedStreamError"], tuple[str, str, bool, int | None]]:
        return type(self), (self.file, self.reason, self.is_truncated, self.checked_bytes)
