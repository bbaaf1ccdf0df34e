"""Files, folders and globs, in a fixed order and under names that do not depend on the place."""

import os
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from preprocessing.reading.sources import expand_sources


@pytest.fixture
def _tree(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.parquet", "sub/d.jsonl", "notes.txt", ".hidden/e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


def names(*sources: str) -> list[str]:
    return [file.name for file in expand_sources(sources)]


def test_a_folder_gives_its_data_files_by_name(_tree: Path):
    assert names(str(_tree)) == ["a.jsonl.gz", "b.jsonl", "sub/c.parquet", "sub/d.jsonl"]


def test_a_glob_gives_what_it_matches(_tree: Path):
    assert names(f"{_tree}/*.jsonl*") == ["a.jsonl.gz", "b.jsonl"]
    assert names(f"{_tree}/**/*.jsonl") == [".hidden/e.jsonl", "b.jsonl", "sub/d.jsonl"]


def test_files_come_in_the_order_given_and_keep_distinct_names(_tree: Path):
    assert names(f"{_tree}/notes.txt", f"{_tree}/b.jsonl", f"{_tree}/b.jsonl") == ["notes.txt", "b.jsonl", "b.jsonl#2"]


@pytest.mark.parametrize(
    ("source", "message"),
    [("nope", "no file or folder"), ("empty", "holds no data file"), ("x*", "holds no data file")],
)
def test_a_source_without_files_is_an_error(tmp_path: Path, source: str, message: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message):
        expand_sources([f"{tmp_path}/{source}"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "an empty text is no file"),
        ("~no such user/x.jsonl", "no such user has a home"),
        ("**a/b*", "the glob .* cannot be used"),
    ],
)
def test_a_source_that_can_name_no_file_is_an_error_that_says_why(source: str, message: str):
    with pytest.raises(ConfigError, match=message):
        expand_sources([source])


def test_a_file_name_that_is_no_unicode_is_refused_since_no_recipe_can_hold_it(tmp_path: Path):
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text("{}")

    with pytest.raises(ConfigError, match=r"udcff.jsonl' is not valid UTF-8. Rename"):
        expand_sources([str(tmp_path)])
