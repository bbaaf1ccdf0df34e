"""Records of conversations: turns that are read and said."""

import json
from typing import Any

import pytest

from preprocessing.config import IngestConfig
from preprocessing.reading.turns import BadTurnsError, TurnFormat

ALPACA = TurnFormat(prompt="### Task:\n{instruction}\n{input}\n### Answer:\n", response="{output}")
CHAT = TurnFormat(messages="messages", turn="<{role}>{content}</{role}>\n")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_templates_take_keys_of_the_record() -> None:
    record = {"instruction": "Add {1}.", "input": None, "output": "2"}

    assert ALPACA.turns_of(record) == ["### Task:\nAdd {1}.\n\n### Answer:\n", "2"]
    assert TurnFormat(prompt="{a.b}", response="{c}").turns_of({"a": {"b": "x"}, "c": "y"}) == ["x", "y"]


def test_messages_are_read_up_to_the_assistants_words() -> None:
    messages = [
        _message("system", "Be brief."),
        _message("user", "1+1?"),
        _message("assistant", "2"),
        _message("user", "2+2?"),
        _message("assistant", "4"),
        _message("user", "Thanks."),
    ]

    assert CHAT.turns_of({"messages": messages}) == [
        "<system>Be brief.</system>\n<user>1+1?</user>\n<assistant>",
        "2</assistant>\n",
        "<user>2+2?</user>\n<assistant>",
        "4</assistant>\n",
    ]


@pytest.mark.parametrize(
    ("form", "record", "reason"),
    [
        (ALPACA, {"instruction": "a", "input": ""}, "no key 'output'; keys present: input, instruction"),
        (ALPACA, {"instruction": "a", "input": "", "output": " "}, "response 1 is empty"),
        (ALPACA, {"instruction": "a", "input": 3, "output": "b"}, "'input' is not text"),
        (ALPACA, ["a"], "not an object"),
        (CHAT, {"messages": "hello"}, "not a list of messages"),
        (CHAT, {"messages": ["hello"]}, "message 1 is not an object"),
        (CHAT, {"messages": [_message("user", "x")]}, "nothing to be said"),
        (CHAT, {"messages": [_message("user", "x"), _message("assistant", "")]}, "message 2 of the assistant is empty"),
    ],
)
def test_what_is_no_conversation_says_why(form: TurnFormat, record: Any, reason: str) -> None:
    with pytest.raises(BadTurnsError, match=reason):
        form.turns_of(record)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": {"prompt": "no key"}}, "names no key"),
        ({"turns": {"turn": "{role}"}}, "must hold {content} once"),
        ({"turns": {}, "sentences": "en"}, "leave out sentences"),
        ({"turns": {}, "keep_empty": True}, "leave out sentences and keep_empty"),
    ],
)
def test_unusable_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IngestConfig.model_validate(changes)


def test_turns_joined_are_the_text() -> None:
    record = {"prompt": "a b ", "response": "c"}

    assert "".join(TurnFormat().turns_of(json.loads(json.dumps(record)))) == "a b c"
