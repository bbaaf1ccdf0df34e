"""The same projection through a real MLflow server over HTTP."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_database import described
from small_artifacts import make_chain

from contracts.projection import sync
from contracts.store import ArtifactStore
from contracts.tracking import Tracker

pytestmark = [pytest.mark.servers, pytest.mark.slow]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = shutil.which("mlflow", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("the program mlflow is not installed beside this Python")
    command = [program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
    command += ["--artifacts-destination", str(tmp_path / "server-files")]
    quiet = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    log = (tmp_path / "server.log").open("w")
    # Its own session: the server starts processes that outlive it, and all must end.
    server = subprocess.Popen(
        command, env={**os.environ, **quiet}, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path
    )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()


def wait_until_healthy(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError("the MLflow server did not start")


def test_a_server_shows_the_same_as_a_file(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # the machine of the tests may be busy
    store = ArtifactStore(tmp_path / "store")
    make_chain(store)
    served, local = Tracker(store.root, "pile", uri=address), Tracker(store.root, "pile")

    sync(store, served)
    sync(store, local)

    assert described(served) == described(local)
    assert sync(store, served).written == 0
