from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import Field

from contracts.configuration import Settings, load_yaml, parse_yaml, validated, with_overrides
from contracts.errors import ConfigError

CASE = Path(__file__).parents[2] / "cases" / "TRN-45" / "train.yaml"


class TrainSettings(Settings):
    lr: float
    min_lr: float
    weight_decay: float
    train_iters: int
    warmup_iters: int = 0
    seed: int
    clip_grad: float
    recompute: bool
    eval_interval: int
    adam_beta2: float = Field(0.95, description="Decay of the second moment.")


class Inner(Settings):
    learning_rate: float = 1e-3


class Outer(Settings):
    optimizer: Inner = Inner()
    weights: dict[str, float] = Field(default_factory=dict)
    schedule: list[Inner] = Field(default_factory=list)


def message(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def test_numbers_that_users_write_become_numbers():
    text = CASE.read_text().replace("warmup_iters: 010", "warmup_iters: 8").replace("adam_beta2: 0,95", "")

    settings = validated(TrainSettings, parse_yaml(text, "train.yaml"))

    assert settings.lr == 0.0001
    assert (settings.min_lr, settings.weight_decay, settings.clip_grad) == (1e-5, 0.1, 1.0)
    assert (settings.train_iters, settings.seed, settings.eval_interval) == (1000, 1234, 100)
    assert all(type(n) is int for n in (settings.train_iters, settings.seed, settings.eval_interval))
    assert settings.recompute is False


def test_a_leading_zero_is_an_error_that_names_line_and_both_readings():
    text = message(lambda: load_yaml(CASE))

    assert "train.yaml, line 6: warmup_iters is 010" in text
    assert "Write 10, or 0o10" in text


def test_a_decimal_comma_is_an_error_that_names_key_value_and_type():
    document = parse_yaml(CASE.read_text().replace("010", "10"), "train.yaml")

    text = message(lambda: validated(TrainSettings, document))

    assert "train.yaml, line 11: adam_beta2 is '0,95' (text)" in text
    assert "valid number" in text


def test_an_unknown_key_names_the_nearest():
    document = parse_yaml("optimizer:\n  learning_rat: 1\n", "p.yaml")

    assert message(lambda: validated(Outer, document)) == (
        "p.yaml, line 2: unknown setting optimizer.learning_rat. Did you mean learning_rate?"
    )


def test_a_key_given_twice_is_an_error_with_its_line():
    assert "p.yaml, line 3: a.b is given twice" in message(lambda: parse_yaml("a:\n  b: 1\n  b: 2\n", "p.yaml"))


def test_keys_of_the_user_stay_in_the_message_also_with_capitals():
    document = parse_yaml("weights:\n  Pile-CC: heavy\n", "p.yaml")

    assert "p.yaml, line 2: weights.Pile-CC is 'heavy'" in message(lambda: validated(Outer, document))


def test_all_wrong_settings_are_told_at_once():
    document = parse_yaml("optimizer:\n  learning_rate: fast\nschedule:\n  - lr: 1\n", "p.yaml")

    lines = message(lambda: validated(Outer, document)).splitlines()

    assert [line.split(":")[0] for line in lines] == ["p.yaml, line 2", "p.yaml, line 4"]


def test_an_override_is_named_as_the_place_of_its_error():
    document = with_overrides(parse_yaml("optimizer: {learning_rate: 1}\n", "p.yaml"), ["optimizer.learning_rate=x"])

    assert message(lambda: validated(Outer, document)).startswith("-s optimizer.learning_rate=x: ")


def test_overrides_reach_into_groups_lists_and_new_groups():
    document = parse_yaml("schedule:\n  - learning_rate: 1\n", "p.yaml")

    changed = with_overrides(document, ["schedule.0.learning_rate=2e-4", "weights.Pile=0.5"])

    assert changed.data == {"schedule": [{"learning_rate": 2e-4}], "weights": {"Pile": 0.5}}
    assert document.data == {"schedule": [{"learning_rate": 1}]}


@pytest.mark.parametrize("text", ["lr", "=3", "a..b=1", "schedule.7.lr=1"])
def test_an_override_that_leads_nowhere_is_refused(text: str):
    document = parse_yaml("schedule: []\n", "p.yaml")

    assert f"-s {text}" in message(lambda: with_overrides(document, [text]))


def test_a_section_that_is_no_group_is_refused():
    document = parse_yaml("pretrain: false\n", "p.yaml")

    assert "pretrain" in message(lambda: validated(Outer, document, section="pretrain"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1, 2", "not YAML"),
        ("- 1\n- 2", "expected settings"),
        ("a: &x [*x]", "alias"),
        ("a: !!python/object:os.system x", "tag"),
        ("? [1]\n: 2", "plain text"),
        ("a: 1\n---\nb: 2", "not YAML"),
    ],
)
def test_what_is_no_settings_file_is_refused_with_the_reason(text: str, reason: str):
    found = message(lambda: parse_yaml(text, "p.yaml"))

    assert found.startswith("p.yaml")
    assert reason in found


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("1" + "0" * 30, "too large; integers go up to 9223372036854775807"),
        ("-" + "1" * 5000, "too large"),
        ("true", "true is no number"),
        ("1e30", "1e\\+30"),
        (".nan", "nan"),
    ],
)
def test_a_value_that_no_64_bit_integer_holds_is_refused_by_name(value: str, reason: str):
    class Sizes(Settings):
        samples: int | None = None

    with pytest.raises(ConfigError, match=f"samples.*{reason}"):
        validated(Sizes, parse_yaml(f"samples: {value}", "sizes.yaml"))


@pytest.mark.parametrize("value", ['"a\\0b"', '"\\uD800"'])
def test_text_that_no_file_name_or_json_can_hold_is_refused_with_its_line(value: str):
    assert "x.yaml, line 2: store holds a NUL or half of a character" in message(
        lambda: parse_yaml(f"name: a\nstore: {value}", "x.yaml")
    )


def test_aliases_that_multiply_and_endless_nesting_are_refused_before_they_fill_the_memory():
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    laughs += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20))

    assert "aliases of aliases" in message(lambda: parse_yaml(laughs, "bomb.yaml"))
    assert "nested too deeply" in message(lambda: parse_yaml("[" * 5000, "deep.yaml"))


def test_a_missing_file_is_named(tmp_path: Path):
    assert str(tmp_path / "none.yaml") in message(lambda: load_yaml(tmp_path / "none.yaml"))
