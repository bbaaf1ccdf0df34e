"""What a crash or a bad disk can leave in `metrics.jsonl` and its neighbours."""

from pathlib import Path

import pytest

from contracts.errors import InputError
from evaluation.report import read_curve
from training.metrics import cut, read
from training.step_folders import find_latest

GOOD = b'{"step": 1, "loss_nats": 5.0}\n{"step": 2, "loss_nats": 4.0}\n'
DAMAGES = (b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"step": "2"}\n', b'{"step"\n')


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resumed_run_keeps_the_good_lines_and_drops_the_damaged(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(damage + GOOD)

    cut(path, after_step=1)

    assert [line["step"] for line in read(path)] == [1]


@pytest.mark.parametrize("damage", [b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"step"\n'])
def test_a_report_forgives_a_cut_last_line_and_names_any_other(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + damage)
    assert [row["step"] for row in read_curve(path)] == [1, 2]

    path.write_bytes(damage + GOOD)
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1: damaged"):
        read_curve(path)


def test_a_tracker_file_of_random_bytes_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xff")

    assert find_latest(tmp_path)[0] is None
