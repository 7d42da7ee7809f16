"""Many runs on one GPU: room on the card, second tries, turns."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ullage_lab.measure import pool as parallel_runs
from ullage_lab.measure.pool import ParallelRuns, RunKind


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def parallel(run: Any, *, total: int = 100, at_once: int = 4, timeout: float = 60.0, **more: Any) -> ParallelRuns:
    turns = more.pop("turns", 0)
    kind = RunKind(
        prepare=more.pop("prepare", lambda row: row),
        run=run if turns else lambda row, pause: run(row),
        gpu_memory=lambda row: row["need"],
        turns=turns,
        renew=more.pop("renew", None),
    )
    return ParallelRuns(kind, total=total, at_once=at_once, timeout=timeout, **more)


def rows(*needs: int) -> list[dict[str, Any]]:
    return [{"id": f"o{number}", "need": need} for number, need in enumerate(needs)]


def test_runs_share_the_card_only_as_far_as_it_has_room(tmp_path: Path) -> None:
    """Each run leaves a file while it runs; the needs of those seen together never exceed the card."""

    def run(row: dict[str, Any]) -> dict[str, Any]:
        mark = tmp_path / f"{row['id']}_{row['need']}"
        mark.touch()
        seen = 0
        for _ in range(20):
            seen = max(seen, sum(int(file.name.split("_")[1]) for file in tmp_path.iterdir()))
            time.sleep(0.002)
        mark.unlink()
        return {"seen": seen}

    found = [answer["seen"] for _, answer in parallel(run, total=100).work(rows(60, 50, 40, 30, 60, 20, 100, 10))]
    assert len(found) == 8
    assert max(found) <= 100


def test_one_that_needs_more_than_the_card_runs_alone() -> None:
    found = list(parallel(lambda row: {}, total=10).work(rows(500, 5, 5)))
    assert len(found) == 3


def test_a_run_over_its_time_is_killed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes as soon as one hangs."""
    hangs = tmp_path / "hangs"
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * hangs.exists())
    monkeypatch.setattr(parallel_runs, "time", clock)

    def run(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == "o1":
            hangs.touch()
            signal.pause()
        return {"done": True}

    found = {row["id"]: answer for row, answer in parallel(run, timeout=60, at_once=1).work(rows(1, 1, 1))}
    assert found["o0"] == found["o2"] == {"done": True}
    assert "longer than 60 s" in found["o1"]["failed"]


def test_a_run_that_failed_in_company_is_tried_again_alone(tmp_path: Path) -> None:
    """The first try of each run waits for the other one, so that both are in company."""

    def run(row: dict[str, Any]) -> dict[str, Any]:
        mark = tmp_path / row["id"]
        first = not mark.exists()
        mark.touch()
        if first:
            wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        return {"oom": "no memory"} if row["id"] == "o0" and first else {"fine": True}

    found = {
        row["id"]: answer
        for row, answer in parallel(run, at_once=2, retry=lambda answer: "oom" in answer).work(rows(1, 1))
    }
    assert found["o0"] == {"fine": True, "alone": True}
    assert found["o1"] == {"fine": True}


def test_a_run_that_fails_alone_is_not_tried_again(tmp_path: Path) -> None:
    def run(row: dict[str, Any]) -> dict[str, Any]:
        with (tmp_path / "tries").open("a") as file:
            file.write("x")
        return {"oom": "no memory"}

    found = list(parallel(run, at_once=1, retry=lambda answer: "oom" in answer).work(rows(1)))
    assert found[0][1] == {"oom": "no memory"}
    assert (tmp_path / "tries").read_text() == "x"


def test_an_error_and_a_crash_are_answers() -> None:
    def run(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == "o0":
            raise ValueError("bad sizes\nand more")
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    found = {row["id"]: answer for row, answer in parallel(run, at_once=1).work(rows(1, 1))}
    assert found["o0"]["failed"] == "ValueError: bad sizes"
    assert found["o1"]["failed"].startswith("the process was ended by SIGKILL")


def test_children_prepare_while_another_one_runs(tmp_path: Path) -> None:
    """The first run ends only when the second one has prepared; the second must not run before that."""

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / f"prepared {row['id']}").touch()
        return row

    def run(row: dict[str, Any]) -> dict[str, Any]:
        wait_for(lambda: len(list(tmp_path.glob("prepared *"))) == 2)
        others = [file.name for file in tmp_path.glob("runs *")]
        (tmp_path / f"runs {row['id']}").touch()
        (tmp_path / f"runs {row['id']}").unlink()
        return {"others": others}

    found = list(parallel(run, prepare=prepare, total=10, at_once=2).work(rows(10, 10)))
    assert [answer["others"] for _, answer in found] == [[], []]


def test_stopping_early_leaves_no_process_behind(tmp_path: Path) -> None:
    def run(row: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / str(os.getpid())).touch()
        if row["id"] != "o0":
            signal.pause()
        wait_for(lambda: len(list(tmp_path.iterdir())) == 3)
        return {}

    work = parallel(run, at_once=3).work(rows(1, 1, 1))
    next(work)
    work.close()  # type: ignore[attr-defined]
    started = [Path("/proc", file.name) for file in tmp_path.iterdir()]
    assert len(started) == 3 and not any(process.exists() for process in started)


def test_the_machines_own_memory_is_promised_too(tmp_path: Path) -> None:
    def prepare(row: dict[str, Any]) -> Any:
        (tmp_path / row["id"]).touch()
        return row

    def run(row: dict[str, Any], pause: Any) -> dict[str, Any]:
        together = len(list(tmp_path.iterdir()))
        (tmp_path / row["id"]).unlink()
        return {"together": together}

    kind = RunKind(prepare=prepare, run=run, gpu_memory=lambda row: 1, host_memory=lambda row: 40)
    found = list(ParallelRuns(kind, total=100, at_once=4, timeout=60, host_total=100).work(rows(1, 1, 1, 1, 1)))
    assert max(answer["together"] for _, answer in found) <= 2


@pytest.mark.slow
def test_in_turns_one_goes_on_while_all_others_stand_still(tmp_path: Path) -> None:
    """All write down what they do all the time; while one has its turn nobody else writes, wherever it is."""

    def work_for_a_while(name: str) -> None:
        for _ in range(10):
            (tmp_path / f"{name}-{os.getpid()}").write_text(str(time.monotonic()))
            time.sleep(0.002)

    def is_at_work(pid: int) -> bool:
        """Whether a process may be in the midst of a write: it was stopped, and has not noticed yet."""
        try:
            return psutil.Process(pid).status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
        except psutil.NoSuchProcess:
            return False

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        work_for_a_while(f"prepares-{row['id']}")
        return row

    def run(row: dict[str, Any], pause: Any) -> dict[str, Any]:
        work_for_a_while(f"first-{row['id']}")
        pause()
        pids = {int(file.name.rpartition("-")[2]) for file in tmp_path.iterdir()} - {os.getpid()}
        wait_for(lambda: not any(is_at_work(pid) for pid in pids))
        before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
        time.sleep(0.05)
        return {"same": before == {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}}

    for renew in (None, lambda: time.sleep(0.01)):
        work = parallel(run, prepare=prepare, total=100, turns=2, at_once=5, renew=renew).work(rows(*[20] * 9))
        assert [answer["same"] for _, answer in work] == [True] * 9


def test_no_waiting_run_is_forgotten() -> None:
    """Many short runs: some say that they are ready, or pause, in the moment in which they are stopped."""

    def run(row: dict[str, Any], pause: Any) -> dict[str, Any]:
        time.sleep(0.002)
        pause()
        return {"fine": True}

    work = parallel(run, total=1000, turns=2, at_once=6, renew=lambda: None).work(rows(*[1] * 150))
    assert [answer for _, answer in work if not answer.get("fine")] == []


def test_a_run_that_fails_before_its_turn_delays_no_other() -> None:
    def run(row: dict[str, Any], pause: Any) -> dict[str, Any]:
        if row["id"] == "o1":
            raise ValueError("no")
        if row["id"] == "o2":
            os._exit(3)
        pause()
        return {"fine": True}

    found = {row["id"]: answer for row, answer in parallel(run, turns=4).work(rows(1, 1, 1, 1))}
    assert found["o0"] == found["o3"] == {"fine": True}
    assert "ValueError: no" in found["o1"]["failed"] and "without an answer" in found["o2"]["failed"]


def test_a_process_that_can_be_renewed_goes_on_with_other_rows() -> None:
    """Twelve rows in four processes; the memory of the card is promised to each until it has given it back."""
    given_back: list[int] = []

    def run(row: dict[str, Any], pause: Any) -> dict[str, Any]:
        pause()
        return {"process": os.getpid(), "renewed": len(given_back)}

    work = parallel(run, turns=2, at_once=4, renew=lambda: given_back.append(1)).work(rows(*[30] * 12))
    found = dict((row["id"], answer) for row, answer in work)
    assert sorted(found) == sorted(f"o{number}" for number in range(12))
    assert len({answer["process"] for answer in found.values()}) == 4
    assert all(answer.get("in_process", 0) == answer["renewed"] for answer in found.values())


def test_memory_of_a_row_counts_until_its_process_is_renewed(tmp_path: Path) -> None:
    """The card has room for one. Renewing takes a while; nobody runs before it is over."""

    def run(row: dict[str, Any], pause: Any) -> dict[str, Any]:
        held = [file.name for file in tmp_path.iterdir() if Path("/proc", file.name).exists()]
        (tmp_path / str(os.getpid())).touch()
        pause()
        return {"held": held}

    def renew() -> None:
        time.sleep(0.05)
        (tmp_path / str(os.getpid())).unlink()

    work = parallel(run, turns=1, at_once=2, total=100, renew=renew).work(rows(*[90] * 5))
    assert [answer["held"] for _, answer in work] == [[]] * 5


def test_a_process_with_a_failed_row_is_replaced_for_the_next(tmp_path: Path) -> None:
    """Rows one after the other: o1, o3 and o5 are the second of their process, and each ends it in its own way."""

    def run(row: dict[str, Any], pause: Any) -> dict[str, Any]:
        mark = tmp_path / row["id"]
        first = not mark.exists()
        mark.touch()
        if row["id"] == "o1" and first:
            raise ValueError("no")
        if row["id"] == "o3" and first:
            os._exit(3)
        pause()
        return {"process": os.getpid(), **({"oom": "no memory"} if row["id"] == "o5" and first else {})}

    work = parallel(run, turns=2, at_once=1, renew=lambda: None, retry=lambda answer: {"failed", "oom"} & answer.keys())
    found = {row["id"]: answer for row, answer in work.work(rows(*[1] * 8))}
    assert len(found) == 8 and not any({"failed", "oom"} & answer.keys() for answer in found.values())
    again = [found[name] for name in ("o1", "o3", "o5")]
    assert all(answer["alone"] and "in_process" not in answer for answer in again)
    assert len({answer["process"] for answer in found.values()}) == 4 + 3


def test_runs_that_pause_several_times_are_read_in_rounds(tmp_path: Path) -> None:
    """Each of six pauses three times: nobody has a second turn before all that wait had their first."""

    def run(row: dict[str, Any], pause: Any) -> dict[str, Any]:
        for number in range(3):
            pause()
            with (tmp_path / "turns").open("a") as file:
                file.write(f"{row['id']} {number}\n")
        return {"fine": True}

    for renew in (None, lambda: None):
        (tmp_path / "turns").unlink(missing_ok=True)
        work = parallel(run, turns=6, at_once=6, renew=renew).work(rows(*[10] * 6))
        assert [answer["fine"] for _, answer in work] == [True] * 6
        turns = [line.split() for line in (tmp_path / "turns").read_text().splitlines()]
        assert [number for _, number in turns] == ["0"] * 6 + ["1"] * 6 + ["2"] * 6
        assert len({name for name, _ in turns[:6]}) == 6
