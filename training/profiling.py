"""Chrome traces of some training steps, one for each pipeline stage: open them in chrome://tracing or Perfetto."""

from pathlib import Path

import torch

from training.mesh import Mesh


class StepProfiler:
    """Records the steps that `profile_steps` names, counted from the start of this process.

    Args:
        steps: First and last step; None records nothing.
        folder: Receives `trace-rank-N.json.gz`, from the first rank of each stage.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, mesh: Mesh) -> None:
        is_mine = steps is not None and mesh.rank("tp") == 0 and mesh.rank("dp") == 0 and mesh.rank("cp") == 0
        self.first, self.last = steps if is_mine and steps is not None else (0, 0)
        self.path = folder / f"trace-rank-{torch.distributed.get_rank()}.json.gz"
        self._number = 0
        self._profile: torch.profiler.profile | None = None

    def before_step(self) -> None:
        """Begin to record where this step is the first."""
        self._number += 1
        if self._number == self.first:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()

    def after_step(self) -> Path | None:
        """Write the trace where this step was the last; returns its path."""
        if self._profile is None or self._number < self.last:
            return None
        self.close()
        return self.path

    def close(self) -> None:
        """Write what was recorded, if anything is open."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
            self._profile = None
