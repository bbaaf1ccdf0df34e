"""Starting ranks: what the user is told when one fails, and that none is ever left behind."""

import os
import time
from pathlib import Path

import pytest

from contracts.errors import ConfigError, ShardlineError
from training.launch import run_ranks

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def _finds_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


def _run(mode: str, folder: Path, **options: object) -> None:
    run_ranks("launched_rank", [mode, str(folder)], nproc=2, log_dir=folder / "logs", **options)  # type: ignore[arg-type]


def _assert_gone(folder: Path) -> None:
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_ranks_get_safe_paths_loopback_and_their_share_of_the_cores(tmp_path: Path) -> None:
    _run("environment", tmp_path)

    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (tmp_path / "environment-0").read_text() == f"1 lo {threads}"
    _assert_gone(tmp_path)


def test_a_users_mistake_on_a_rank_is_shown_as_it_was_worded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _run("config", tmp_path)

    assert str(caught.value) == "layout.tensor_parallel is wrong. Use 2."
    _assert_gone(tmp_path)


def test_what_a_rank_tells_reaches_the_user_once_and_its_log(tmp_path: Path) -> None:
    notes: list[str] = []

    _run("tell", tmp_path, on_note=notes.append)

    assert notes == ["the first note", "the second note"]
    assert "the second note" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_a_crash_is_one_line_with_the_log_that_has_the_rest(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError) as caught:
        _run("crash", tmp_path)

    log = tmp_path / "logs" / "rank-1.log"
    assert str(caught.value) == f"Rank 1 failed: RuntimeError: the disk is full. See {log}."
    assert "Traceback" in log.read_text()
    _assert_gone(tmp_path)


def test_a_rank_that_did_its_work_succeeds_even_if_the_interpreter_would_crash_at_shutdown(tmp_path: Path) -> None:
    _run("abort at exit", tmp_path)
    _assert_gone(tmp_path)


def test_a_layout_that_no_machine_of_this_size_carries_starts_no_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs 1000000 ranks on this machine"):
        run_ranks("launched_rank", ["environment", str(tmp_path)], nproc=1_000_000, log_dir=tmp_path / "logs")
    assert not list(tmp_path.iterdir())


def test_a_killed_rank_ends_the_others_within_seconds_and_is_named(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ShardlineError, match=r"Rank 1 was (killed|ended by SIGKILL).*rank-1\.log and launcher\.log"):
        _run("kill", tmp_path)
    assert time.monotonic() - started < 30
    _assert_gone(tmp_path)


@pytest.mark.parametrize("mode", ["kill, deaf", "crash, deaf"])
def test_ranks_that_do_not_notice_that_one_is_gone_are_ended_all_the_same(mode: str, tmp_path: Path) -> None:
    """torchrun itself waits 30 s for ranks that ignore SIGTERM, as one inside a collective does."""
    times: list[float] = []

    def look() -> None:
        if (tmp_path / "gone").exists():
            times.append(time.monotonic())

    with pytest.raises(ShardlineError, match="Rank 1 "):
        _run(mode, tmp_path, on_poll=look)

    assert times[-1] - times[0] < 15
    _assert_gone(tmp_path)


def test_ranks_that_hang_are_ended_with_the_stacks_of_each(tmp_path: Path) -> None:
    with pytest.raises(
        ShardlineError, match=r"No rank got on for \d+ s .*rank 0: training step 3; rank 1: training step 2"
    ):
        _run("hang in a step", tmp_path, hang_timeout_s=8)

    for rank in (0, 1):
        stacks = (tmp_path / "logs" / f"rank-{rank}.stacks").read_text()
        assert "in wait_for_ever" in stacks
        assert "most recent call first" in stacks
    _assert_gone(tmp_path)


def test_a_rank_that_gets_on_slowly_does_not_hang(tmp_path: Path) -> None:
    _run("slow", tmp_path, hang_timeout_s=8)
    _assert_gone(tmp_path)


class _Interrupted(BaseException):
    pass


def test_an_interrupt_asks_the_ranks_to_save_first(tmp_path: Path) -> None:
    def interrupt() -> None:
        if len(list(tmp_path.glob("pid-*"))) == 2:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        _run("wait", tmp_path, stop_file=tmp_path / "stop", on_poll=interrupt)

    assert len(list(tmp_path.glob("stopped-*"))) == 2
    _assert_gone(tmp_path)


def test_ranks_that_do_not_listen_are_ended(tmp_path: Path) -> None:
    def interrupt() -> None:
        if len(list(tmp_path.glob("pid-*"))) == 2:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        _run("hang", tmp_path, stop_file=tmp_path / "stop", grace_s=0.5, on_poll=interrupt)
    _assert_gone(tmp_path)
