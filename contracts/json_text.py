"""JSON from outside, which may be damaged or written to do harm."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Read JSON; whatever is wrong with the text is a ValueError, too deep a nesting included.

    Raises:
        ValueError: The text is no JSON, or nested too deeply, or a number has too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
