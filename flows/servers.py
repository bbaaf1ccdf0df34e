"""Prefect and MLflow servers over one store, on loopback, with a worker: `up` starts, `down` stops.

Each runs in a process group of its own, with its state below `<store>/.servers/`. Telemetry is
off. What runs is written to `<store>/.servers/servers.json`, which the other commands read.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from contracts.errors import ConfigError, ShardlineError
from contracts.json_text import parse_json
from contracts.progress import Progress

FOLDER = ".servers"
WORK_POOL = "shardline"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0

QUIET = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}


@dataclass(frozen=True)
class Servers:
    """Addresses of the servers of a store, and the process group of each part."""

    prefect_url: str
    mlflow_url: str
    groups: Mapping[str, int]

    @property
    def prefect_api(self) -> str:
        return f"{self.prefect_url}/api"


def running(store: Path) -> Servers | None:
    """Return the servers of a store if `up` started them and they still live."""
    try:
        data = parse_json((store / FOLDER / "servers.json").read_text(encoding="utf-8"))
        servers = Servers(**data)
    except (OSError, ValueError, TypeError):
        return None
    needed = [pid for name, pid in servers.groups.items() if name != "worker"]
    return servers if needed and all(_group_lives(pid) for pid in needed) else None


def up(
    store: Path,
    *,
    host: str = "127.0.0.1",
    prefect_port: int = 4200,
    mlflow_port: int = 5000,
    with_worker: bool = True,
    progress: Progress,
) -> Servers:
    """Start what does not run yet, and return when all answer.

    Raises:
        ConfigError: A port is taken by something else.
        ShardlineError: A server ended or did not answer in time; the message names its log.
    """
    if (found := running(store)) is not None:
        return found
    folder = store.resolve() / FOLDER
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    prefect_port = _usable_port(host, prefect_port, "--prefect-port")
    mlflow_port = _usable_port(host, mlflow_port, "--mlflow-port")
    prefect_url, mlflow_url = f"http://{host}:{prefect_port}", f"http://{host}:{mlflow_port}"
    groups: dict[str, int] = {}
    try:
        groups["prefect"] = _start(
            folder,
            "prefect",
            ["-m", "prefect", "server", "start", "--host", host, "--port", str(prefect_port)],
            {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_API_HOST": host},
        )
        backend = f"sqlite:///{store.resolve() / 'mlflow.db'}"
        where = ["--backend-store-uri", backend, "--artifacts-destination", str(store.resolve() / "mlartifacts")]
        address = ["--host", host, "--port", str(mlflow_port), "--workers", "1"]
        groups["mlflow"] = _start(folder, "mlflow", ["-m", "mlflow", "server", *address, *where], {})
        _wait(f"{prefect_url}/api/health", "prefect", groups["prefect"], folder, progress)
        _wait(f"{mlflow_url}/health", "mlflow", groups["mlflow"], folder, progress)
        if with_worker:
            servers = Servers(prefect_url, mlflow_url, groups)
            _create_pool(servers, folder)
            groups["worker"] = _start(
                folder,
                "worker",
                ["-m", "prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process"],
                client_environment(servers, store),
            )
    except BaseException:
        for pid in groups.values():
            _stop(pid)
        raise
    servers = Servers(prefect_url, mlflow_url, groups)
    (folder / "servers.json").write_text(json.dumps(asdict(servers), indent=1) + "\n", encoding="utf-8")
    return servers


def down(store: Path) -> list[str]:
    """Stop what `up` started, children included; return the names of what was stopped."""
    path = store / FOLDER / "servers.json"
    try:
        servers = Servers(**parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return []
    stopped = []
    for name in ("worker", "mlflow", "prefect"):
        pid = servers.groups.get(name)
        if pid is not None and _stop(pid):
            stopped.append(name)
    path.unlink(missing_ok=True)
    return stopped


def client_environment(servers: Servers, store: Path) -> dict[str, str]:
    """Return the environment with which Prefect clients and flows reach the servers."""
    return {
        **QUIET,
        "PREFECT_API_URL": servers.prefect_api,
        "PREFECT_HOME": str(store.resolve() / FOLDER / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "MLFLOW_TRACKING_URI": servers.mlflow_url,
    }


def is_answering(url: str, timeout_s: float = 2.0) -> bool:
    """Say whether an address answers with 200; never raises."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def _start(folder: Path, name: str, arguments: list[str], environment: Mapping[str, str]) -> int:
    log = (folder / "logs" / f"{name}.log").open("ab")
    with log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **QUIET, "PYTHONSAFEPATH": "1", **environment},
            start_new_session=True,
        )
    return process.pid


def _create_pool(servers: Servers, folder: Path) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "prefect",
            "work-pool",
            "create",
            WORK_POOL,
            "--type",
            "process",
            "--overwrite",
        ],
        env={**os.environ, **client_environment(servers, folder.parent), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    if run.returncode != 0:
        raise ShardlineError(f"The Prefect work pool could not be created: {run.stderr.strip() or run.stdout.strip()}")


def _wait(url: str, name: str, pid: int, folder: Path, progress: Progress) -> None:
    started = time.monotonic()
    log = folder / "logs" / f"{name}.log"
    while not is_answering(url):
        waited = time.monotonic() - started
        if not _group_lives(pid):
            tail = " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
            raise ShardlineError(f"The {name} server ended while starting: {tail}. See {log}.")
        if waited > START_TIMEOUT_S:
            raise ShardlineError(
                f"The {name} server did not answer at {url} within {START_TIMEOUT_S:.0f} s. See {log}."
            )
        progress.update(round(waited), total=None, unit=f"s, waiting for {name}")
        time.sleep(0.3)


def _usable_port(host: str, port: int, flag: str) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{flag} {port} on {host} cannot be used ({error.strerror}). Give another, or 0 for any free one."
            ) from error
        return int(probe.getsockname()[1])


def _group_lives(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # a child of this very process would stay a zombie
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stop(pid: int) -> bool:
    """Ask a process group to end, then make it end; False if it was gone already."""
    if not _group_lives(pid):
        return False
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while _group_lives(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
    return True
