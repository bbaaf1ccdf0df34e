"""Registers the deployments of `prefect.yaml` with a server, and submits runs to them."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError, ShardlineError
from contracts.store import ArtifactStore
from flows.pipeline import PipelineConfig
from flows.servers import SILENT_S, Servers, client_environment, is_answering, running
from flows.silence import SILENCE

HOME = Path(__file__).resolve().parent.parent
ZOMBIE_RULE = "shardline: dead flows are crashed"


def reachable(store: Path) -> Servers:
    """Return the servers of a store, or those of PREFECT_API_URL, after asking whether they answer.

    Raises:
        ConfigError: There are none, or Prefect does not answer.
    """
    servers = running(store)
    if servers is None and (address := os.environ.get("PREFECT_API_URL")):
        servers = Servers(address.removesuffix("/").removesuffix("/api"), os.environ.get("MLFLOW_TRACKING_URI", ""), {})
    if servers is None:
        raise ConfigError(f"no Prefect server: run  shardline up --store {store}  first, or set PREFECT_API_URL.")
    if not is_answering(f"{servers.prefect_api}/health"):
        raise ConfigError(
            f"Prefect does not answer at {servers.prefect_api}. Start it with  shardline up --store {store}."
        )
    return servers


def register_all(store: Path, file: Path | None = None) -> list[str]:
    """Register every deployment of a prefect.yaml; return their names, as flow/deployment.

    Raises:
        ConfigError: No server answers, or there is no prefect.yaml.
        ShardlineError: Prefect refused; its message is passed on.
    """
    servers = reachable(store)
    # In a wheel the file stands beside this module, in a checkout beside the packages.
    shipped = next((path for path in (HOME / "flows" / "prefect.yaml", HOME / "prefect.yaml") if path.is_file()), None)
    file = (file or shipped or HOME / "prefect.yaml").resolve()
    if not file.is_file():
        raise ConfigError(f"{file} does not exist. Give --file with the path of a prefect.yaml.")
    environment = _environment(servers, store)
    run = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)],
        cwd=HOME,
        env={**os.environ, **environment, "SHARDLINE_HOME": str(HOME), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        lines = [line.strip() for line in (run.stderr + run.stdout).splitlines() if line.strip()]
        raise ShardlineError(f"prefect deploy failed: {' | '.join(lines[-3:])}")
    os.environ.update(environment)
    return asyncio.run(_after_deploy())


def _environment(servers: Servers, store: Path) -> dict[str, str]:
    if servers.groups:
        return client_environment(servers, store)
    return {**SILENCE, "PREFECT_API_URL": servers.prefect_api, "PREFECT_SERVER_EPHEMERAL_ENABLED": "false"}


async def _after_deploy() -> list[str]:
    """Create the rule that marks silent flows crashed, and list the deployments that now exist."""
    from prefect.automations import Automation
    from prefect.client.orchestration import get_client
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification
    from prefect.states import StateType

    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENT_S),
    )
    action = ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat: the flow's process is gone")
    async with get_client() as client:
        for old in await client.read_automations_by_name(ZOMBIE_RULE):
            await client.delete_automation(old.id)
        await Automation(name=ZOMBIE_RULE, trigger=trigger, actions=[action]).acreate()
        deployments = await client.read_deployments()
        flows = {flow.id: flow.name for flow in await client.read_flows()}
    return sorted(f"{flows.get(item.flow_id, '?')}/{item.name}" for item in deployments if "shardline" in item.tags)


def submit_run(
    config: PipelineConfig, store: ArtifactStore, *, deployment: str, force: Sequence[str]
) -> tuple[str, str]:
    """Start a run of the chain's deployment; return its id and the address of its page.

    Raises:
        ConfigError: No server answers, or the deployment is not registered.
    """
    servers = reachable(store.root)
    os.environ.update(_environment(servers, store.root))
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

    parameters: dict[str, Any] = {"config": config.model_dump(mode="json"), "force": list(force)}
    parameters["config"]["store"] = str(store.root.resolve())
    name = f"pipeline/{deployment}"
    try:
        run: Any = run_deployment(name, parameters=parameters, timeout=0, flow_run_name=config.name)
    except ObjectNotFound:
        where = f"shardline deploy --store {store.root}"
        raise ConfigError(f"there is no deployment {name}. Run  {where}  first.") from None
    except PrefectHTTPStatusError as error:
        reason = error.response.json().get("detail", str(error))
        raise ShardlineError(
            f"Prefect refused the run: {reason}. If Shardline was updated since, run  shardline deploy  again."
        ) from error
    return str(run.id), f"{servers.prefect_url}/runs/flow-run/{run.id}"


def wait_for(run_id: str, store: ArtifactStore, *, tell: Callable[[str], None], every_s: float = 1.0) -> str:
    """Wait until a run has ended and return the name of its state; `tell` hears of each stage as it changes."""
    os.environ.update(_environment(reachable(store.root), store.root))
    return asyncio.run(_wait_for(run_id, tell, every_s))


async def _wait_for(run_id: str, tell: Callable[[str], None], every_s: float) -> str:
    from uuid import UUID

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(run_id)]))
    seen: dict[str, str | None] = {}
    async with get_client() as client:
        while True:
            run = await client.read_flow_run(UUID(run_id))
            for task in await client.read_task_runs(flow_run_filter=chosen):
                if seen.get(task.name) != task.state_name:
                    seen[task.name] = task.state_name
                    tell(f"{task.name:<20} {task.state_name}")
            if run.state is not None and run.state.is_final():
                return str(run.state.name)
            await asyncio.sleep(every_s)
