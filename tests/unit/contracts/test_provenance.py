import getpass
import sys

import pytest

from contracts.provenance import masked, provenance, without_secrets


def test_secrets_on_the_command_line_are_masked():
    arguments = ["--hub-token", "hf_1", "-s", "a.api_key=2", "--password=3", "s3://me:4@host/x", "--force"]

    assert without_secrets(arguments) == [
        "--hub-token",
        "***",
        "-s",
        "a.api_key=***",
        "--password=***",
        "s3://***@host/x",
        "--force",
    ]


def test_tokens_of_the_vocabulary_and_counts_are_no_secrets():
    arguments = ["shard_tokens=1000", "tokenizer=gpt2", "--eos-token=<eos>", "num_tokens=3"]

    assert without_secrets(arguments) == arguments


def test_secrets_in_settings_are_masked_at_any_depth():
    assert masked({"hub": [{"token": "x", "url": "u"}], "secret": None, "lr": 1}) == {
        "hub": [{"token": "***", "url": "u"}],
        "secret": None,
        "lr": 1,
    }


def test_a_user_without_a_name_is_recorded_by_number(monkeypatch: pytest.MonkeyPatch):
    def nameless() -> str:
        raise KeyError("uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", nameless)

    assert provenance()["user"].isdigit()


def test_versions_and_command_are_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/shardline", "run", "demo.yaml"])

    found = provenance()

    assert found["command"] == ["shardline", "run", "demo.yaml"]
    assert "numpy" in found["packages"]
