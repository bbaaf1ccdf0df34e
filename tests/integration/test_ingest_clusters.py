"""The ingest stage on Ray and Dask clusters that the tests start themselves: same bytes, same refusals."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpora import texts, write_corpus
from ingest_cases import ingest_files

from contracts.errors import ConfigError, RecordError
from preprocessing.ingestion import dask_executor, ray_executor
from preprocessing.ingestion.executors import refuse_silent_cluster

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"part_bytes": 5000, "shard_tokens": 3000}


def _needs(package: str) -> pytest.MarkDecorator:
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"{package} is not installed: pip install 'shardline[{package}]'")


EXECUTORS = [pytest.param("ray", marks=_needs("ray")), pytest.param("dask", marks=_needs("distributed"))]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Worker processes of a cluster import the code under test.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    yield
    logging.getLogger("distributed").setLevel(logging.CRITICAL)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_local_cluster_gives_the_bytes_of_local_processes(tmp_path: Path, executor: str):
    source = write_corpus(tmp_path / "a.jsonl", texts(300))
    lines = source.read_bytes().split(b"\n")
    bad = write_corpus(tmp_path / "b.jsonl", texts(300))
    bad.write_bytes(b"\n".join([*lines[:250], b"{}", *lines[250:]]))

    alone = ingest_files([str(source)], tmp_path / "alone", workers=2, **SETTINGS)
    cluster = ingest_files([str(source)], tmp_path / "cluster", executor=executor, workers=2, **SETTINGS)

    assert alone.summary["shards"] > 8
    assert cluster.manifest.content == alone.manifest.content
    assert cluster.summary == alone.summary
    with pytest.raises(RecordError, match=r"b\.jsonl, line 251: no key 'text'"):
        ingest_files([str(bad)], tmp_path / "refused", executor=executor, workers=2, **SETTINGS)
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
@_needs("distributed")
def test_a_dask_cluster_that_runs_already_is_used_by_its_address(tmp_path: Path):
    from distributed import LocalCluster

    source = write_corpus(tmp_path / "a.jsonl", texts(200))
    alone = ingest_files([str(source)], tmp_path / "alone", **SETTINGS)
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        result = ingest_files([str(source)], tmp_path / "out", executor="dask", cluster=address, **SETTINGS)

    assert result.manifest.content == alone.manifest.content


@pytest.mark.parametrize(("module", "package"), [(ray_executor, "ray"), (dask_executor, "dask")])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, module: Any, package: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, {"ray": "ray", "dask": "distributed"}[package], None)
    source = write_corpus(tmp_path / "a.jsonl", texts(3))

    with pytest.raises(
        ConfigError, match=rf"executor is {package}, which is not installed. Install shardline\[{package}\]"
    ):
        ingest_files([str(source)], tmp_path / "out", executor=package)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "127.0.0.1:1", "tcp://127.0.0.1:1/"])
def test_a_cluster_that_does_not_answer_is_named(address: str):
    with pytest.raises(ConfigError, match=rf"ingest\.cluster \({address}\): Name cannot be reached"):
        refuse_silent_cluster(address, "Name")


@pytest.mark.slow
@_needs("distributed")
def test_a_dask_address_without_a_scheduler_is_refused(tmp_path: Path):
    source = write_corpus(tmp_path / "a.jsonl", texts(3))

    with pytest.raises(ConfigError, match=r"ingest\.cluster \(tcp://127\.0\.0\.1:1\): Dask cannot be reached"):
        ingest_files([str(source)], tmp_path / "out", executor="dask", cluster="tcp://127.0.0.1:1")
    assert not (tmp_path / "out").exists()
