"""Prefect and MLflow servers over one store, on loopback, with a worker: `up` starts, `down` stops.

Each runs in a process group of its own, with its state below `<store>/.servers/`. Telemetry is
off. What runs is written to `<store>/.servers/servers.json`, which the other commands read.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError, ShardlineError
from contracts.files import write_atomically
from contracts.json_text import parse_json
from contracts.progress import Progress
from flows.silence import SILENCE

FOLDER = ".servers"
WORK_POOL = "shardline"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
# A flow that is silent for six heartbeats is taken for dead: a loaded machine delays some.
HEARTBEAT_S = 30
SILENT_S = 6 * HEARTBEAT_S


@dataclass(frozen=True)
class Group:
    """A process group, with the start of its first process: a number is used again after a reboot."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "Group":
        return cls(pid, _started(pid))

    def lives(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # a child of this very process would stay a zombie
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return False  # somebody else's: the number was used again
        return _started(self.pid) in ("", self.started)


@dataclass(frozen=True)
class Servers:
    """Addresses of the servers of a store, and the process group of each part that `up` started."""

    prefect_url: str
    mlflow_url: str
    groups: Mapping[str, Group]

    @property
    def prefect_api(self) -> str:
        return f"{self.prefect_url}/api"


def running(store: Path) -> Servers | None:
    """Return the servers of a store if `up` started them and they still live."""
    servers = _recorded(store)
    if servers is None:
        return None
    needed = [servers.groups.get(name) for name in ("prefect", "mlflow")]
    return servers if all(group is not None and group.lives() for group in needed) else None


def _recorded(store: Path) -> Servers | None:
    try:
        data: dict[str, Any] = parse_json((store / FOLDER / "servers.json").read_text(encoding="utf-8"))
        groups = {name: Group(int(group["pid"]), str(group["started"])) for name, group in data["groups"].items()}
        return Servers(str(data["prefect_url"]), str(data["mlflow_url"]), groups)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def up(
    store: Path,
    *,
    host: str = "127.0.0.1",
    prefect_port: int = 4200,
    mlflow_port: int = 5000,
    with_worker: bool = True,
    progress: Progress,
) -> Servers:
    """Start what does not run yet, a worker that died included, and return when all answer.

    Raises:
        ConfigError: A port is taken by something else.
        ShardlineError: A server ended or did not answer in time; the message names its log.
    """
    folder = store.resolve() / FOLDER
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder):
        servers = running(store)
        if servers is None:
            down(store)  # what is left of an earlier set
            servers = _start_servers(folder, host, prefect_port, mlflow_port, progress)
        worker = servers.groups.get("worker")
        if with_worker and (worker is None or not worker.lives()):
            servers = _start_worker(servers, store, folder)
        write_atomically(folder / "servers.json", json.dumps(asdict(servers), indent=1) + "\n")
    return servers


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    with (folder / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start_servers(folder: Path, host: str, prefect_port: int, mlflow_port: int, progress: Progress) -> Servers:
    store = folder.parent
    prefect_port = _usable_port(host, prefect_port, "--prefect-port")
    mlflow_port = _usable_port(host, mlflow_port, "--mlflow-port")
    prefect_url, mlflow_url = f"http://{host}:{prefect_port}", f"http://{host}:{mlflow_port}"
    groups: dict[str, Group] = {}
    try:
        prefect = ["-m", "prefect", "server", "start", "--host", host, "--port", str(prefect_port)]
        home = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_API_HOST": host}
        home["PREFECT_SERVER_UI_API_URL"] = f"{prefect_url}/api"  # else its page asks port 4200
        groups["prefect"] = _start(folder, "prefect", prefect, home)
        where = ["--backend-store-uri", f"sqlite:///{store / 'mlflow.db'}"]
        where += ["--artifacts-destination", str(store / "mlartifacts")]
        address = ["--host", host, "--port", str(mlflow_port), "--workers", "1"]
        groups["mlflow"] = _start(folder, "mlflow", ["-m", "mlflow", "server", *address, *where], {})
        _wait(f"{prefect_url}/api/health", "prefect", groups["prefect"], folder, progress)
        _wait(f"{mlflow_url}/health", "mlflow", groups["mlflow"], folder, progress)
    except BaseException:
        for group in groups.values():
            _stop(group)
        raise
    return Servers(prefect_url, mlflow_url, groups)


def _start_worker(servers: Servers, store: Path, folder: Path) -> Servers:
    environment = client_environment(servers, store)
    _create_pool(environment, folder)
    arguments = ["-m", "prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process"]
    worker = _start(folder, "worker", arguments, environment)
    return replace(servers, groups={**servers.groups, "worker": worker})


def down(store: Path) -> list[str]:
    """Stop what `up` started, children included; return the names of what was stopped."""
    servers = _recorded(store)
    stopped = []
    for name in ("worker", "mlflow", "prefect"):
        group = servers.groups.get(name) if servers is not None else None
        if group is not None and _stop(group):
            stopped.append(name)
    (store / FOLDER / "servers.json").unlink(missing_ok=True)
    return stopped


def client_environment(servers: Servers, store: Path) -> dict[str, str]:
    """Return the environment with which Prefect clients and flows reach the servers."""
    return {
        **SILENCE,
        "PREFECT_API_URL": servers.prefect_api,
        "PREFECT_HOME": str(store.resolve() / FOLDER / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        # Without it flows beat every 180 s, and the rule for dead flows would take live ones for dead.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "MLFLOW_TRACKING_URI": servers.mlflow_url,
    }


def is_answering(url: str, timeout_s: float = 2.0) -> bool:
    """Say whether an address answers with 200; never raises."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def _start(folder: Path, name: str, arguments: list[str], environment: Mapping[str, str]) -> Group:
    log = (folder / "logs" / f"{name}.log").open("ab")
    with log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **SILENCE, "PYTHONSAFEPATH": "1", **environment},
            start_new_session=True,
        )
    return Group.of(process.pid)


def _create_pool(environment: Mapping[str, str], folder: Path) -> None:
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
        env={**os.environ, **environment, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    if run.returncode != 0:
        raise ShardlineError(f"The Prefect work pool could not be created: {run.stderr.strip() or run.stdout.strip()}")


def _wait(url: str, name: str, group: Group, folder: Path, progress: Progress) -> None:
    started = time.monotonic()
    log = folder / "logs" / f"{name}.log"
    while not is_answering(url):
        waited = time.monotonic() - started
        if not group.lives():
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


def _started(pid: int) -> str:
    """Start of a process in clock ticks since boot; "" where it is gone or /proc is absent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _stop(group: Group) -> bool:
    """Ask a process group to end, then make it end; False if it was gone already."""
    if not group.lives():
        return False
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group.pid, number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while group.lives() and time.monotonic() < deadline:
            time.sleep(0.1)
    return True
