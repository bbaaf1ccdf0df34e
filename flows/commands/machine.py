"""Commands about this machine: doctor, up, down, deploy."""

from pathlib import Path
from typing import Annotated

import typer

from contracts.store import ArtifactStore
from flows.options import JsonOption, StoreOption, show, store_at


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (doctor, up, down, deploy):
        app.command(rich_help_panel="This machine")(command)


def doctor(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Say what this machine can do: cores, memory, disk, devices, packages, ports, servers.

    Exit code 1 if something that Shardline needs is missing. Example: [bold]shardline doctor[/bold]
    """
    from flows.doctor import examine

    checks = examine(store_at(store).root)
    if as_json:
        show({"checks": [check.__dict__ for check in checks]})
    else:
        for check in checks:
            print(f"{check.verdict:<8} {check.name:<20} {check.detail}")
    if any(check.verdict == "missing" for check in checks):
        raise typer.Exit(1)


def up(
    store: StoreOption = None,
    prefect_port: Annotated[int, typer.Option(help="Port of Prefect; 0 takes a free one.", min=0, max=65535)] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow; 0 takes a free one.", min=0, max=65535)] = 5000,
    host: Annotated[
        str, typer.Option(help="Address to bind. Others than loopback have no password: mind who can reach it.")
    ] = "127.0.0.1",
    worker: Annotated[bool, typer.Option(help="Also start a worker that executes deployment runs.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Start Prefect and MLflow servers over the store, on loopback, with a worker.

    Example: [bold]shardline up --store store[/bold]
    """
    from flows.servers import up as start
    from flows.terminal import TerminalProgress, error_console

    root = store_at(store).root
    with TerminalProgress("up", error_console()) as progress:
        servers = start(
            root, host=host, prefect_port=prefect_port, mlflow_port=mlflow_port, with_worker=worker, progress=progress
        )
    if as_json:
        show(
            {
                "prefect": servers.prefect_url,
                "mlflow": servers.mlflow_url,
                "groups": {name: group.pid for name, group in servers.groups.items()},
            }
        )
        return
    print(f"Prefect  {servers.prefect_url}")
    print(f"MLflow   {servers.mlflow_url}/#/experiments?workflowType=machine_learning")
    print(f"next:    shardline deploy --store {root}   then   shardline submit FILE")
    print(f"stop:    shardline down --store {root}")


def down(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Stop the servers and the worker that `up` started. Example: [bold]shardline down[/bold]"""
    from flows.servers import down as stop

    where = store_at(store)
    root = where.root
    working = [f"{build.kind}/{build.path.name}" for build in where.builds() if build.holder is not None]
    stopped = stop(root)
    ended = [name for name in working if "worker" in stopped and name not in _still_built(where)]
    if as_json:
        show({"stopped": stopped, "ended": ended})
    else:
        for name in ended:
            print(f"{name} was being built and has ended; the same run goes on from what it saved.")
        print(
            f"stopped: {', '.join(stopped)}"
            if stopped
            else f"nothing that belongs to the store {root.absolute()} is running."
        )


def _still_built(store: ArtifactStore) -> set[str]:
    return {f"{build.kind}/{build.path.name}" for build in store.builds() if build.holder is not None}


def deploy(
    store: StoreOption = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="prefect.yaml with the deployments. Default: Shardline's own.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Register the deployments of prefect.yaml with the Prefect server, and the rule that marks dead flows crashed.

    Example: [bold]shardline deploy --store store[/bold]
    """
    from flows.deployments import register_all

    names = register_all(store_at(store).root, file)
    if as_json:
        show({"deployments": names})
    else:
        print("\n".join(f"deployed {name}" for name in names))
        print("next: shardline submit FILE --watch")
