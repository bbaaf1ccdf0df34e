"""Ingest by several machines that share a folder: rank R of W does the parts whose number is R modulo W.

Ranks may start in any order and at any time, and be started again. Each part has its own lease,
so that a rank that runs twice does nothing twice. Whoever finds all parts done puts the dataset
together; if the last rank was killed before that, any rank started again does, or a plain ingest.
"""

import contextlib
from collections.abc import Mapping

from contracts.artifact import MANIFEST, Artifact
from contracts.errors import ConfigError
from contracts.files import storage_errors
from contracts.lease import Lease
from contracts.progress import Progress, SilentProgress
from contracts.store import ArtifactStore
from contracts.workspace import RESULT, Workspace
from preprocessing.config import IngestConfig
from preprocessing.ingestion.ingest import INGEST, REFUSALS, begin, do_parts
from preprocessing.ingestion.parts import BuildOverError, give_up


def ingest_share(
    settings: IngestConfig,
    inputs: Mapping[str, Artifact],
    store: ArtifactStore,
    *,
    rank: int,
    world: int,
    label: str = "",
    progress: Progress | None = None,
) -> Artifact | None:
    """Do the parts of one rank; return the dataset if all parts of all ranks are done, else None.

    Args:
        rank, world: 0 <= rank < world.
        label: First part of the dataset's name, the same for all ranks.

    Raises:
        ConfigError: Rank and world contradict each other, or the settings are wrong.
        ShardlineError: From the stage; the build is then given up by all ranks.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"--rank is {rank} and --world is {world}: ranks are counted from 0 to world - 1.")
    progress = progress or SilentProgress()
    with contextlib.ExitStack() as stack:
        # Ranks that start together would each read the whole corpus for its digests; so one reads, the others look up.
        with contextlib.suppress(OSError):  # a store that cannot be written remembers no digests either
            name = "the list of digests of source files"
            stack.enter_context(Lease(store.root / ".digesting", name=name, progress=progress))
        recipe = INGEST.recipe(settings, inputs={n: item.fingerprint for n, item in inputs.items()}, store=store)

    def lay_down_plan(workspace: Workspace) -> None:
        if workspace.kept_result() is None:
            begin(settings, inputs, workspace.path)

    workspace = store.share(INGEST.kind, label or INGEST.name, recipe, lay_down_plan, inputs=inputs, progress=progress)
    if isinstance(workspace, Artifact):
        return workspace
    if workspace.kept_result() is None and not _do_share(settings, inputs, workspace, rank, world, progress):
        return None
    return INGEST.run(settings, inputs=inputs, store=store, progress=progress, label=label)


def _do_share(
    settings: IngestConfig,
    inputs: Mapping[str, Artifact],
    workspace: Workspace,
    rank: int,
    world: int,
    progress: Progress,
) -> bool:
    """Do the parts of a rank; True if no part of any rank is left."""
    path = workspace.path
    try:
        with storage_errors(path):
            work = do_parts(settings, inputs, path, progress=progress, rank=rank, world=world, may_begin=False)
            left = len(work.job.unfinished_parts())
    except BuildOverError:
        if any((path / name).exists() for name in (RESULT, MANIFEST)):
            return True  # another process has put it together
        raise
    except REFUSALS:
        with Lease(path, name=str(path), progress=progress):
            give_up(workspace)
        with contextlib.suppress(OSError):
            path.rmdir()
        raise
    total = len(work.job.parts)
    mine = len(range(rank, total, world))
    progress.note(f"rank {rank} of {world}: its {mine} parts are done; {total - left} of {total} in all")
    return left == 0
