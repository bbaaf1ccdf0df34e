"""Commands over a whole chain: init, run, plan, status, submit."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from contracts.artifact import Artifact
from contracts.errors import ShardlineError
from contracts.store import ArtifactStore
from flows.options import JsonOption, ModelOption, SetOption, headline, show, tell_rejected

FileArgument = Annotated[Path, typer.Argument(help="Pipeline file, as `shardline init` writes it.", metavar="FILE")]
Names = list[str] | None


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    panel = "The whole chain"
    app.command(rich_help_panel=panel)(init)
    app.command(rich_help_panel=panel)(run)
    app.command(rich_help_panel=panel)(plan)
    app.command(rich_help_panel=panel)(status)
    app.command(rich_help_panel=panel)(submit)


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write into; made if absent.", metavar="DIR")] = Path(),
    preset: Annotated[str, typer.Option(help="Which chain to start from; an unknown name lists them.")] = "demo",
    model: ModelOption = None,
) -> None:
    """Write a commented pipeline.yaml, with its JSON schema beside it for editors.

    Example: [bold]shardline init my-run --preset demo[/bold]
    """
    from flows.presets import write_preset

    path = write_preset(folder, preset, model=model)
    print(f"wrote {path} and {path.parent / 'pipeline.schema.json'}")
    print(f"next: edit it, then  shardline plan {path}  and  shardline run {path}")


def run(
    file: FileArgument,
    overrides: SetOption = None,
    only: Annotated[Names, typer.Option(help="Run only this stage; may be repeated.", metavar="STAGE")] = None,
    start: Annotated[str | None, typer.Option("--from", help="First stage to run.", metavar="STAGE")] = None,
    force: Annotated[Names, typer.Option(help="Build this stage anew; may be repeated.", metavar="STAGE")] = None,
    track: Annotated[bool, typer.Option(help="Record runs in MLflow as the file says.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Run the chain; what is done is skipped, what was interrupted goes on. Needs no server.

    Example: [bold]shardline run my-run/pipeline.yaml -s pretrain.train_steps=500[/bold]
    """
    from flows import engine
    from flows.pipeline import load_pipeline, steps_of
    from flows.recording import Recorder
    from flows.terminal import TerminalProgress, error_console

    started = time.monotonic()
    config = load_pipeline(file, overrides or ())
    if not track:
        config = config.model_copy(update={"tracking": config.tracking.model_copy(update={"is_on": False})})
    store = ArtifactStore(Path(config.store))
    steps = steps_of(config)
    console = error_console()
    recorder = Recorder.of(config, store, note=lambda text: console.print(f"  {text}", highlight=False, markup=False))
    built: list[str] = []

    def conduct(planned: engine.Planned, build: engine.Build) -> Artifact:
        name = planned.step.name
        if planned.action == "skip":
            artifact = recorder.conduct(planned, lambda: build(TerminalProgress(name, console)))
            _say(console, name, "done already", artifact, "")
            return artifact
        begun = time.monotonic()
        why = "" if planned.state == "absent" else f"({planned.reason})"
        _say(console, name, f"{planned.action} {why}", None, "")
        with TerminalProgress(name, console) as progress:
            artifact = recorder.conduct(planned, lambda: build(progress))
        built.append(name)
        tell_rejected(artifact, console.print)
        _say(console, name, "built", artifact, f"in {time.monotonic() - begun:.1f} s")
        return artifact

    done = engine.run(steps, store, conduct=conduct, force=force or (), only=only or (), start=start)
    if as_json:
        show({"built": built, "artifacts": {name: _brief(item) for name, item in done.items()}})
        return
    if not built:
        print(f"nothing to do: all {len(done)} stages are done. (--force STAGE builds one anew.)")
    else:
        print(f"{len(built)} built, {len(done) - len(built)} skipped, in {time.monotonic() - started:.0f} s.")
    _farewell(file, store, done)


def _say(console: Any, name: str, what: str, artifact: Artifact | None, more: str) -> None:
    where = f"{artifact.kind}/{artifact.path.name}" if artifact is not None else ""
    console.print(f"{name:<20} {what:<14} {where} {more}".rstrip(), highlight=False, markup=False, soft_wrap=True)


def _brief(artifact: Artifact) -> dict[str, Any]:
    return {
        "kind": artifact.kind,
        "path": str(artifact.path),
        "fingerprint": artifact.fingerprint,
        "summary": dict(artifact.summary),
    }


def _farewell(file: Path, store: ArtifactStore, done: dict[str, Artifact]) -> None:
    """Say where the results are and what to type next."""
    for name, artifact in done.items():
        if artifact.kind == "evaluation":
            shown = "  ".join(f"{key} {value}" for key, value in headline(artifact).items())
            print(f"  {name:<20} {shown}")
    if (report := done.get("report")) is not None:
        print(f"report: {report.path / 'report.html'}")
    if (checkpoint := done.get("pretrain")) is not None:
        at = f"--store {store.root}"
        print("next, to see which documents the model saw at a step, and where it came from:")
        print(f"  shardline trace {checkpoint.name} --step 1 {at}")
        print(f"  shardline lineage {checkpoint.name} {at}")


def plan(
    file: FileArgument,
    overrides: SetOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say field by field why a stage would run.")] = False,
    force: Annotated[Names, typer.Option(help="As for run.", metavar="STAGE")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what `run` would do, and why, and what it costs; build nothing. Exit code 3: work to do.

    Example: [bold]shardline plan my-run/pipeline.yaml --explain[/bold]
    """
    from flows import engine
    from flows.pipeline import load_pipeline, steps_of
    from flows.planning import cost_of, differences

    config = load_pipeline(file, overrides or ())
    store = ArtifactStore(Path(config.store))
    planned = engine.plan(steps_of(config), store, force=force or ())
    cost = cost_of(config, planned)
    pending = [item for item in planned if item.action != "skip"]
    reasons = {item.step.name: differences(item, store) for item in pending} if explain else {}
    if as_json:
        rows = [
            {
                "stage": item.step.name,
                "action": item.action,
                "state": item.state,
                "reason": item.reason,
                "fingerprint": item.recipe.fingerprint,
                "path": str(store.locate(item.step.stage.kind, item.step.label, item.recipe)),
                "differences": reasons.get(item.step.name, []),
            }
            for item in planned
        ]
        show({"stages": rows, "cost": cost})
    else:
        for item in planned:
            print(f"{item.step.name:<20} {item.action:<7} {item.recipe.fingerprint[:12]}  {item.reason}")
            for line in reasons.get(item.step.name, []):
                print(f"{'':<28} {line}")
        for key, value in cost.items():
            print(f"{key:<20} {value}")
        print("nothing to do." if not pending else f"{len(pending)} of {len(planned)} stages to run.")
    if pending:
        raise typer.Exit(3)


def status(
    file: Annotated[
        Path | None, typer.Argument(help="Pipeline file. Default: all of the store.", metavar="FILE")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds, until Ctrl-C.")] = False,
    store: Annotated[Path | None, typer.Option("--store", help="Artifact store.", metavar="DIR")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what runs now: stage, progress, loss, time left, and who runs it.

    Example: [bold]shardline status my-run/pipeline.yaml --watch[/bold]
    """
    from flows.options import store_at
    from flows.pipeline import load_pipeline
    from flows.status import describe, observe

    where = ArtifactStore(Path(load_pipeline(file).store)) if file is not None else store_at(store)
    while True:
        builds = observe(where)
        if as_json:
            show({"store": str(where.root), "builds": builds})
        else:
            if watch:
                print("\033[2J\033[H", end="")
            print("\n".join(describe(builds)) or f"nothing is being built in {where.root.absolute()} or beside it.")
        if not watch:
            return
        time.sleep(2.0)


def submit(
    file: FileArgument,
    overrides: SetOption = None,
    deployment: Annotated[str, typer.Option(help="Deployment of the pipeline flow.")] = "local",
    force: Annotated[Names, typer.Option(help="As for run.", metavar="STAGE")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Wait for the run and exit with its result.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan here, then hand the chain to a Prefect deployment. Needs `up` and `deploy` first.

    Example: [bold]shardline submit my-run/pipeline.yaml --watch[/bold]
    """
    from flows import engine
    from flows.deployments import submit_run, wait_for
    from flows.pipeline import load_pipeline, steps_of

    config = load_pipeline(file, overrides or ())
    store = ArtifactStore(Path(config.store))
    for item in engine.plan(steps_of(config), store, force=force or ()):  # refuses what could not run
        if not as_json:
            print(f"{item.step.name:<20} {item.action:<7} {item.reason}")
    run_id, url = submit_run(config, store, deployment=deployment, force=force or ())
    if not as_json:
        print(f"submitted: {url}", flush=True)
    tell = (lambda text: None) if as_json else (lambda text: print(text, flush=True))
    try:
        state = wait_for(run_id, store, tell=tell) if watch else "Scheduled"
    except KeyboardInterrupt:
        print(f"stopped watching; the run goes on at {url} (cancel it there)", file=sys.stderr)
        raise typer.Exit(0) from None
    if as_json:
        show({"flow_run": run_id, "url": url, "state": state})
    elif watch:
        print(f"the run ended: {state}. What it made:  shardline run {file}  (skips what is done)")
    if watch and state != "Completed":
        raise ShardlineError(f"the run {run_id} ended as {state}; its log is at {url}")
