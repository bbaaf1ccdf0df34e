"""Datasets of the Hugging Face hub, streamed through `datasets`: hf://NAME[/CONFIG]:SPLIT.

NAME is `owner/name`, or the absolute path of a folder that `datasets` can load. No code of a
dataset is run. `hf://datasets/owner/name/file.parquet` is no dataset, but a file of one, and is
read through `fsspec`.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError
from preprocessing.reading.blocks import BLOCK_ROWS, Position, RowBlock
from preprocessing.reading.damage import DamagedStreamError, ForeignFileError
from preprocessing.reading.parquet import columns_of, rows_of, rows_per_block
from preprocessing.reading.source_file import SourceFile

_ADDRESS = re.compile(r"hf://(?P<name>/[^:]+|[^/:]+(?:/[^/:]+)?)(?:/(?P<config>[^/:]+))?:(?P<split>[\w.-]+)")
_SHARD_BYTES = 64 * 2**20  # a guess, where the hub tells no size


@dataclass(frozen=True)
class HubAddress:
    """A split of a dataset."""

    name: str
    config: str | None
    split: str


def is_hub_address(source: str) -> bool:
    return source.startswith("hf://") and not source.startswith(("hf://datasets/", "hf://buckets/", "hf://spaces/"))


def hub_file(source: str) -> SourceFile:
    """Return a split as a source file; asks the hub for its size.

    Raises:
        ConfigError: The address is wrong, the dataset or the split does not exist, or `datasets` is absent.
    """
    address = _parsed(source)
    _builder.cache_clear()  # a process that lives long must see a new version
    _streamed.cache_clear()
    splits = _builder(address).info.splits
    known = splits[address.split].num_bytes if splits and address.split in splits else _local_bytes(address)
    shards = int(_streamed(address).num_shards)
    name = "/".join(filter(None, (address.name.strip("/").rpartition("/")[2], address.config, address.split)))
    return SourceFile(name, source, num_bytes=known or shards * _SHARD_BYTES)


def _local_bytes(address: HubAddress) -> int:
    files = (_builder(address).config.data_files or {}).get(address.split, [])
    return sum(Path(name).stat().st_size for name in files if Path(name).is_file())


def hub_identity(source: str) -> str:
    """Return what tells this version of a split from another: the commits or times of its files."""
    address = _parsed(source)
    builder = _builder(address)
    files = builder.config.data_files or {}
    found = [[str(split), [list(item) for item in getattr(files[split], "origin_metadata", [])]] for split in files]
    data = json.dumps([str(builder.hash), address.config, address.split, found], sort_keys=True)
    return f"sha256:{hashlib.sha256(data.encode()).hexdigest()}"


def num_hub_shards(source: SourceFile) -> int:
    """Return the number of files that can be read by themselves."""
    return int(_streamed(_parsed(str(source.place))).num_shards)


def hub_blocks(
    source: SourceFile, position: Position, keys: Sequence[str], *, start: int, stop: int | None
) -> Iterator[RowBlock]:
    """Read the shards from `start` to `stop` in blocks, from `position` on.

    Raises:
        DamagedStreamError: After the last row that came.
    """
    dataset = _streamed(_parsed(str(source.place)))
    shards = int(dataset.num_shards)
    shard_bytes = source.size_bytes // shards
    line = 1
    for number in range(start, shards if stop is None else stop):
        try:
            for table in dataset.shard(shards, number).with_format("arrow").iter(batch_size=BLOCK_ROWS):
                names = tuple(table.column_names)
                chosen = table.select(columns_of(keys, names, source))
                count = rows_per_block(chosen.nbytes, chosen.num_rows)
                for first in range(max(0, position.line - line), table.num_rows, count):
                    batches = chosen.slice(first, count).combine_chunks().to_batches()
                    rows = tuple(row for batch in batches for row in rows_of(batch))
                    where = replace(position, line=line + first, offset=0)
                    yield RowBlock(source, where, rows, names, (number + 1 - start) * shard_bytes)
                line += table.num_rows
        except ForeignFileError:
            raise
        except Exception as error:  # of the network, or of the file's own reader
            reason = f"shard {number} of {shards} cannot be read after row {line - 1} of the piece ({error})"
            raise DamagedStreamError(source.name, reason, False) from error


def _parsed(source: str) -> HubAddress:
    found = _ADDRESS.fullmatch(source)
    if found is None:
        raise ConfigError(
            f"{source!r} is no address of a dataset. Write hf://OWNER/NAME:SPLIT or hf://OWNER/NAME/CONFIG:SPLIT, "
            "as in hf://allenai/c4/en:train."
        )
    return HubAddress(found["name"], found["config"], found["split"])


@lru_cache(maxsize=16)
def _builder(address: HubAddress) -> Any:
    return _asked(address, "load_dataset_builder", {})


@lru_cache(maxsize=16)
def _streamed(address: HubAddress) -> Any:
    return _asked(address, "load_dataset", {"split": address.split, "streaming": True})


def _asked(address: HubAddress, function: str, arguments: dict[str, Any]) -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"hf://{address.name}: needs the package datasets. Install shardline[hub], or download the dataset."
        ) from error
    datasets.disable_progress_bars()
    try:
        return getattr(datasets, function)(address.name, address.config, **arguments)
    except Exception as error:  # its own, those of the hub, of the network and of Python
        raise ConfigError(
            f"hf://{address.name}: cannot be loaded ({error}). Check name, config and split ({address.split})."
        ) from error
