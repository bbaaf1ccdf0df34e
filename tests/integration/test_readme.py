"""The README's quickstart, executed line by line in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def quickstart_lines() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.slow
def test_the_quickstart_runs_line_by_line(tmp_path: Path) -> None:
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    outputs: dict[str, str] = {}

    for line in quickstart_lines():
        run = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        expected = 3 if line.startswith("shardline plan ") else 0
        assert run.returncode == expected, f"{line}\n{run.stdout}\n{run.stderr}"
        outputs[line] = run.stdout

    lines = list(outputs)
    assert "sound:" in outputs["shardline verify dataset"]
    assert "checkpoint/run" in outputs["shardline lineage measured"]
    # The last line repeats the one before it, so a dictionary holds it once: its second run did nothing.
    assert "nothing to do" in outputs[lines[-1]]
