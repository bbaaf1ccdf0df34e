"""Engines turn many texts into token ids; each gives exactly the ids of the reference library.

The reference is `tokenizers`. A faster engine is used only after an audit in this very run
(`audit.py`), and since the ids are the same, its name is provenance, never identity. No engine reads
files: what gigatoken's own reader cannot parse it drops without a word.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

from contracts.errors import ConfigError
from preprocessing.tokenization.reference_engine import Engine, ReferenceEngine, UnusableEngineError
from preprocessing.tokenization.tokenizer import Tokenizer

FAST_ABOVE_BYTES = 4 * 2**20  # of input on disk; below, starting and auditing an engine costs more than it saves


@dataclass(frozen=True)
class EngineKind:
    """One way to run a tokenizer.

    Args:
        package: What must be installed; also the name of the extra.
        is_fast: Costs a start and an audit, and pays for large inputs only.
    """

    make: Callable[[Tokenizer], Engine]
    package: str
    is_fast: bool = True


def _reference(tokenizer: Tokenizer) -> Engine:
    return ReferenceEngine(tokenizer)


def _pieces(tokenizer: Tokenizer) -> Engine:
    from preprocessing.tokenization.pieces import piece_engine

    return piece_engine(tokenizer)


def _fastokens(tokenizer: Tokenizer) -> Engine:
    from preprocessing.tokenization.fast_engines import fastokens_engine

    return fastokens_engine(tokenizer)


def _gigatoken(tokenizer: Tokenizer) -> Engine:
    from preprocessing.tokenization.fast_engines import gigatoken_engine

    return gigatoken_engine(tokenizer)


def _tiktoken(tokenizer: Tokenizer) -> Engine:
    from preprocessing.tokenization.tiktoken_engine import tiktoken_engine

    return tiktoken_engine(tokenizer)


# In the order in which `auto` tries them. Measured on 260 MB of mixed text with GPT-2's vocabulary, in
# memory, MB a CPU-second: gigatoken 203, fastokens 215, tiktoken 11, pieces 8.6, tokenizers 2.9.
# gigatoken starts in half the time and takes 80 MB less; fastokens knows more patterns.
ENGINES: Mapping[str, EngineKind] = {
    "gigatoken": EngineKind(_gigatoken, "gigatoken"),
    "fastokens": EngineKind(_fastokens, "fastokens"),
    "tiktoken": EngineKind(_tiktoken, "tiktoken"),
    "pieces": EngineKind(_pieces, "tokenizers", is_fast=False),
    "tokenizers": EngineKind(_reference, "tokenizers", is_fast=False),
}


def make_engine(name: str, tokenizer: Tokenizer) -> Engine:
    """Build an engine by its name.

    Raises:
        UnusableEngineError: It cannot run this tokenizer.
        ConfigError: Its package is not installed.
    """
    kind = ENGINES[name]
    if find_spec(kind.package) is None:
        raise ConfigError(f"engine {name} needs the package {kind.package}. Install shardline[{kind.package}].")
    return kind.make(tokenizer)


def engine_version(name: str) -> str:
    return version(ENGINES[name].package)


def engine_names(setting: str, size_bytes: int) -> list[str]:
    """Return the engines to try, in order, for the setting `engine`; the reference is last.

    Args:
        size_bytes: Input on disk; fast engines are left out by `auto` where it is small.

    Raises:
        ConfigError: The engine asked for is not installed.
    """
    if setting != "auto":
        package = ENGINES[setting].package
        if find_spec(package) is None:
            raise ConfigError(
                f"ingest.engine is {setting}, but {package} is not installed. Install shardline[{package}], "
                "or set ingest.engine: auto."
            )
        return list(dict.fromkeys((setting, "tokenizers")))
    return [
        name
        for name, kind in ENGINES.items()
        if find_spec(kind.package) is not None and (size_bytes > FAST_ABOVE_BYTES or not kind.is_fast)
    ]


def choose_engine(tokenizer: Tokenizer) -> Engine:
    """Return the fastest engine that is the reference library itself, on whole texts or on pieces."""
    try:
        return _pieces(tokenizer)
    except UnusableEngineError:
        return ReferenceEngine(tokenizer)
