"""Tokenizers on disk, in five formats: each becomes the one `Tokenizer`, and is kept as `tokenizer.json`.

| format | files |
|---|---|
| `tokenizers` library | `tokenizer.json` |
| GPT-2 | `vocab.json` + `merges.txt` (or `encoder.json` + `vocab.bpe`) |
| BERT | `vocab.txt` |
| tiktoken | `*.tiktoken`, or Llama 3's `tokenizer.model` |
| SentencePiece | `*.model` |

The format is told by content; `tokenizer_config.json` beside the files is read too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from contracts.errors import ConfigError
from contracts.files import user_path
from contracts.json_text import parse_json
from preprocessing.tokenization.rank_files import is_rank_file, rank_definition
from preprocessing.tokenization.sentencepiece_model import sentencepiece_definition
from preprocessing.tokenization.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from preprocessing.tokenization.vocabulary_files import bert_definition, gpt2_definition

Format = Literal["tokenizers", "gpt2", "bert", "tiktoken", "sentencepiece"]

_GPT2_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_MAIN_NAMES = (TOKENIZER_FILE, *(pair[0] for pair in _GPT2_PAIRS), "vocab.txt")
_FOLDER_GLOBS = ("*.tiktoken", "*.model")
_HEAD_BYTES = 4096


def load_tokenizer(path: str | Path, *, encoding: str | None = None) -> Tokenizer:
    """Read a tokenizer from its files, the folder around them, or a tokenizer or dataset artifact.

    Args:
        encoding: Name of a tiktoken encoding, for a file of ranks that does not tell.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    main = _main_file(user_path(path))
    config = _config_beside(main)
    kind = format_of(main)
    if kind == "tokenizers":
        return Tokenizer(_definition_text(main), config, str(path))
    definition: dict[str, Any]
    own: dict[str, Any] = {}
    if kind == "gpt2":
        definition = gpt2_definition(*_gpt2_pair(main), config)
    elif kind == "bert":
        definition = bert_definition(main, config)
    elif kind == "tiktoken":
        definition, own = rank_definition(main, encoding)
    else:
        definition, own = sentencepiece_definition(main)
    return Tokenizer(json.dumps(definition, ensure_ascii=False), {**own, **config}, str(path))


def tokenizer_files(path: str | Path) -> dict[str, Path]:
    """Return the files of a tokenizer by name, for its identity.

    Raises:
        ConfigError: There is no tokenizer at `path`.
    """
    main = _main_file(user_path(path))
    kind = format_of(main)
    files = {TOKENIZER_FILE if kind == "tokenizers" else main.name: main}
    if kind == "gpt2":
        files = {file.name: file for file in _gpt2_pair(main)}
    if (main.parent / CONFIG_FILE).is_file():
        files[CONFIG_FILE] = main.parent / CONFIG_FILE
    return files


def tokenizer_format(path: str | Path) -> Format:
    """Tell the format of the tokenizer at `path`.

    Raises:
        ConfigError: There is none.
    """
    return format_of(_main_file(user_path(path)))


def has_tokenizer(path: Path) -> bool:
    """Say whether a folder or file is a tokenizer of a known format."""
    try:
        format_of(_main_file(path))
    except ConfigError:
        return False
    return True


def format_of(main: Path) -> Format:
    """Tell the format of a tokenizer by the content of its main file.

    Raises:
        ConfigError: It is none of the known ones.
    """
    try:
        with main.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ConfigError(f"{main}: cannot be read ({error}).") from error
    if is_rank_file(head):
        return "tiktoken"
    if main.name in {name for pair in _GPT2_PAIRS for name in pair}:
        return "gpt2"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return "tokenizers"
    if main.suffix == ".txt":
        return "bert"
    if head.startswith(b"\n"):  # field 1, a piece
        return "sentencepiece"
    raise ConfigError(
        f"{main}: no tokenizer of a known format: tokenizer.json, SentencePiece .model, .tiktoken, vocab.json with "
        "merges.txt, or vocab.txt."
    )


def _main_file(path: Path) -> Path:
    if not path.is_dir():
        if path.is_file():
            return path
        raise _no_tokenizer(path)
    for folder in (path, path / "tokenizer"):  # a dataset keeps a copy of its tokenizer
        for name in _MAIN_NAMES:
            if (folder / name).is_file() and (name != "vocab.json" or (folder / "merges.txt").is_file()):
                return folder / name
        found = [file for pattern in _FOLDER_GLOBS for file in sorted(folder.glob(pattern)) if file.is_file()]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(file.name for file in found)
            raise ConfigError(f"{folder} holds several tokenizers: {names}. Name one of the files.")
    raise _no_tokenizer(path)


def _no_tokenizer(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: there is no tokenizer here. Give a {TOKENIZER_FILE}, a SentencePiece .model, a .tiktoken file, "
        "vocab.json with merges.txt, vocab.txt, a folder that holds one, or a tokenizer artifact; "
        "`shardline tokenizer` trains one."
    )


def _gpt2_pair(main: Path) -> tuple[Path, Path]:
    for pair in _GPT2_PAIRS:
        if main.name in pair:
            files = (main.parent / pair[0], main.parent / pair[1])
            for file in files:
                if not file.is_file():
                    raise ConfigError(f"{file} is missing: {pair[0]} and {pair[1]} belong together.")
            return files
    raise ConfigError(f"{main}: not one of vocab.json and merges.txt.")


def _config_beside(main: Path) -> Mapping[str, Any]:
    file = main.parent / CONFIG_FILE
    if not file.is_file():
        return {}
    config = _json_of(file)
    return config if isinstance(config, dict) else {}


def _definition_text(file: Path) -> str:
    _json_of(file)
    return file.read_bytes().decode("utf-8")


def _json_of(file: Path) -> Any:
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: the tokenizer cannot be read ({error}).") from error
