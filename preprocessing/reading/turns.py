"""Records of conversations: what a model reads and what it is to say, in turn.

A record is a prompt and a response, each written from its keys by a template, or a list of messages with roles.
Either way it becomes an even number of texts: read, said, read, said, ...
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ASSISTANT = "assistant"
_FIELD = re.compile(r"\{([^{}]+)\}")
_CONTENT = "{content}"


class BadTurnsError(Exception):
    """Why a record holds no conversation."""


@dataclass(frozen=True)
class TurnFormat:
    """How a record becomes turns.

    Args:
        prompt: Template of what is read, as in "Question: {question}\\n"; keys in braces, dots go into nested records.
        response: Template of what is to be said.
        messages: Key of a list of {"role", "content"}; then the two templates above are not used.
        turn: Template of a message, with {role} and {content}. Of an assistant's, the text before {content} is read,
            the content and what follows it is said.
    """

    prompt: str = "{prompt}"
    response: str = "{response}"
    messages: str | None = None
    turn: str = "{role}: {content}\n"

    def turns_of(self, record: Any) -> list[str]:
        """Return the texts of a record, read and said in turn; none is empty.

        Raises:
            BadTurnsError: It holds no conversation; has the reason.
        """
        if not isinstance(record, Mapping):
            raise BadTurnsError("the record is not an object")
        if self.messages is None:
            found = [_filled(self.prompt, record), _filled(self.response, record)]
        else:
            found = self._of_messages(_value(record, self.messages))
        for number, text in enumerate(found):
            if not text.strip():
                raise BadTurnsError(f"{'response' if number % 2 else 'prompt'} {number // 2 + 1} is empty")
        return found

    def _of_messages(self, messages: Any) -> list[str]:
        if not isinstance(messages, list) or not messages:
            raise BadTurnsError(f"{self.messages!r} is not a list of messages")
        before, _, after = self.turn.partition(_CONTENT)
        texts = [""]
        for number, message in enumerate(messages, 1):
            if not isinstance(message, Mapping):
                raise BadTurnsError(f"message {number} is not an object with role and content")
            role, content = _text(message, "role"), _text(message, "content")
            head, tail = before.replace("{role}", role), after.replace("{role}", role)
            if role != ASSISTANT:
                if len(texts) % 2 == 0:
                    texts.append("")
                texts[-1] += head + content + tail
                continue
            if not content.strip():
                raise BadTurnsError(f"message {number} of the assistant is empty")
            if len(texts) % 2:
                texts[-1] += head
                texts.append(content + tail)
            else:  # two of the assistant's in a row
                texts += [head, content + tail]
        if len(texts) == 1:
            raise BadTurnsError(f"no message has the role {ASSISTANT!r}, so there is nothing to be said")
        return texts[: len(texts) // 2 * 2]  # what is read last and not answered teaches nothing


def _filled(template: str, record: Mapping[str, Any]) -> str:
    return _FIELD.sub(lambda field: _text(record, field[1]), template)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = _value(record, key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadTurnsError(f"{key!r} is not text")
    return value


def _value(record: Mapping[str, Any], key: str) -> Any:
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            keys = ", ".join(sorted(map(str, record)))
            raise BadTurnsError(f"no key {key!r}; keys present: {keys[:200] or 'none'}")
        value = value[part]
    return value


def fields_of(template: str) -> list[str]:
    """Return the keys that a template names."""
    return _FIELD.findall(template)
