"""Jobs that share a GPU: real processes that train on a stand-in, in sets, with what goes wrong on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.mps import CONTROL

from ullage.errors import UllageError, UnknownName
from ullage.jobs.model import read_rows
from ullage.units import GIB
from ullage_lab.measure import together
from ullage_lab.measure.job_sets import JobSet, draw_sets, rounds, sets_in
from ullage_lab.measure.together import TogetherSettings, measure_together
from ullage_lab.measure.turns import phases, slowdowns, step_alone_at

ROWS = [
    {"id": name, "model": "mlp:x", "widths": [8, 4], "batch": 2, "opt": "sgd", "need": GIB} for name in ("a", "b", "c")
]

# A session that measures jobs which sleep for their steps.
SESSION = """
import sys, time
from pathlib import Path
from ullage_lab.measure import together
from ullage_lab.measure.job_sets import JobSet, sets_in
from ullage.jobs.model import read_rows

folder = Path(sys.argv[1])

def run(row, after_step):
    while True:
        time.sleep(0.004)
        after_step()

together.prepare_here = lambda jobs, left: {"gpu": "none", "uuid": "GPU-0", "free": 100 << 30}
rows = list(read_rows(folder / "list.jsonl"))
settings = together.TogetherSettings(
    out=folder / "out.jsonl", how=("time-slicing",), seconds=0.2, prepare=lambda row: row, run=run)
left, found = together.measure_together(rows, sets_in(rows), settings)
print("left", left, flush=True)
for row in found:
    print(row.get("set"), flush=True)
"""


def settings(folder: Path, run: Any, **more: Any) -> TogetherSettings:
    return TogetherSettings(
        out=folder / "out.jsonl", how=("time-slicing",), seconds=0.1, prepare=lambda row: row, run=run, **more
    )


def sleeping(row: dict[str, Any], after_step: Any) -> None:
    while True:
        time.sleep(0.002)
        after_step()


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    header = {"gpu": "none", "uuid": "GPU-0", "free": 100 * GIB}
    monkeypatch.setattr(together, "prepare_here", lambda jobs, left: dict(header))


def sets(*names: str) -> list[JobSet]:
    return [JobSet(id=name, jobs=tuple(name)) for name in names]


def test_jobs_run_alone_and_then_in_company(tmp_path: Path) -> None:
    """While one is read nobody else makes a step, and in a set all of its jobs do."""

    def run(row: dict[str, Any], after_step: Any) -> None:
        while True:
            time.sleep(0.002)
            with (tmp_path / "steps").open("a") as file:
                file.write(row["id"])
            after_step()

    left, found = measure_together(ROWS, sets("ab", "aac"), settings(tmp_path, run))
    assert left == 2
    rows = list(found)
    assert [row.get("alone") or row["set"] for row in rows] == ["a", "b", "c", "ab", "aac"]
    assert [row["job"] for row in rows[:3]] == ROWS  # so that a file needs no other
    ab, aac = rows[-2:]
    assert len(aac["step_s"]) == len(aac["slowdown"]) == 3 and aac["alone_s"][0] == aac["alone_s"][1]
    assert min(ab["steps"]) >= 4 and ab["step_q1"][0] <= ab["step_median"][0] <= ab["step_q3"][0]
    # Every process makes a step when it starts; then a, b and c alone, the first set, the second.
    order = re.fullmatch("[abc]{4}a+b+c+([ab]+)([ac]+)", (tmp_path / "steps").read_text())
    assert order is not None and (set(order[1]), set(order[2])) == (set("ab"), set("ac"))
    assert [row for row in read_rows(tmp_path / "out.jsonl") if "header" not in row] == rows


def test_in_turns_jobs_run_alone_and_together_again_and_again(tmp_path: Path) -> None:
    """In the same processes, which end no step while it is another one's turn."""

    def run(row: dict[str, Any], after_step: Any) -> None:
        while True:
            time.sleep(0.002)
            with (tmp_path / "steps").open("a") as file:
                file.write(f"{row['id']} {os.getpid()}\n")
            after_step()

    plan = settings(tmp_path, run, rounds=2)
    left, found = measure_together(ROWS, sets("ab"), plan)
    assert left == 1
    rows = list(found)
    assert [row.get("alone") or row["set"] for row in rows] == ["a", "b", "ab"]
    pair = rows[-1]
    assert len(pair["turns"]) == 4 and all(len(turn["alone_s"]) == 2 for turn in pair["turns"])
    assert len({tuple(turn["alone_s"]) for turn in pair["turns"]}) > 1
    assert rows[0]["steps"][0] >= 3 * 4 and min(pair["steps"]) >= 4 * 4
    written = [line.split() for line in (tmp_path / "steps").read_text().splitlines()]
    assert len({process for _, process in written}) == 2
    phase = "[ab]*ab[ab]*|[ab]*ba[ab]*"  # who came first may be either
    order = re.fullmatch(
        f"[ab]{{2}}a+({phase})b+({phase})a+({phase})b+({phase})a+", "".join(name for name, _ in written)
    )
    assert order is not None
    assert measure_together(ROWS, sets("ab"), plan)[0] == 0


def test_a_host_that_becomes_slower_does_not_count_as_company() -> None:
    """A step takes a tenth longer with every reading; in company it takes twice as long as it would alone."""
    order = phases("ab", 3)
    steps = {
        "a": [(moment, 1 + moment / 10) for moment, name in enumerate(order) if name == "a"],
        "b": [(moment, 3 + moment / 10) for moment, name in enumerate(order) if name == "b"],
    }
    turns = [
        {"step_s": [2 + moment / 5, 6 + moment / 5], "alone_s": [step_alone_at(moment, steps[name]) for name in "ab"]}
        for moment, name in enumerate(order)
        if name is None
    ]
    assert slowdowns(turns) == pytest.approx([2, 2])
    assert turns[-1]["step_s"][0] / steps["a"][0][1] > 3  # against the first reading alone


@pytest.mark.slow
def test_training_on_the_stand_in_gpu_is_read(tmp_path: Path) -> None:
    """In a process of its own: one in which a backward pass ran cannot fork others that train."""
    code = """
import sys
from pathlib import Path
import ullage
from ullage_lab.measure import together
from ullage_lab.measure.job_sets import JobSet

def run(prepared, after_step):
    with ullage.virtual_gpu("H200"):
        together._run(prepared, after_step)

together.prepare_here = lambda jobs, left: {"gpu": "none", "uuid": "GPU-0", "free": 100 << 30}
rows = [{"id": name, "model": "mlp:x", "widths": [8, 4], "batch": 2, "opt": "sgd", "need": 1 << 30} for name in "ab"]
plan = together.TogetherSettings(out=Path(sys.argv[1]), how=("time-slicing",), seconds=0.1, run=run)
list(together.measure_together(rows, [JobSet(id="ab", jobs=("a", "b"))], plan)[1])
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "out.jsonl"], check=True, timeout=300)
    (pair,) = [row for row in read_rows(tmp_path / "out.jsonl") if "set" in row]
    assert "failed" not in pair, pair
    assert min(pair["steps"]) >= 4 and pair["unknown_because"]
    assert pair["host_busy"] > 0.1 and 0 <= pair["host_stolen"] <= 1


def test_under_mps_jobs_are_started_with_service_and_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a control program that behaves like NVIDIA's; a service that was left behind is taken over, and ended."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = tmp_path / "told"

    def run(row: dict[str, Any], after_step: Any) -> None:
        told.write_text(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        sleeping(row, after_step)

    plan = TogetherSettings(out=tmp_path / "out.jsonl", how=("mps",), seconds=0.1, prepare=lambda row: row, run=run)
    work = measure_together(ROWS, sets("ab", "bc"), plan)[1]
    assert "failed" not in next(work)
    alive = Path(told.read_text()) / "alive"
    assert alive.exists()
    work.close()  # type: ignore[attr-defined]
    assert not alive.exists()
    alive.touch()  # as a session leaves it that was killed
    assert all("failed" not in row for row in measure_together(ROWS, sets("ab", "bc"), plan)[1])
    (calls,) = tmp_path.glob("ullage-together-*/mps-log/calls")
    assert calls.read_text().split() == ["started", "quit", "quit"]


def test_a_job_that_dies_fails_its_sets_and_no_others(tmp_path: Path) -> None:
    def run(row: dict[str, Any], after_step: Any) -> None:
        own, begin = tmp_path / f"works-{row['id']}", time.time()
        for number in range(10**9):
            time.sleep(0.002)
            own.touch()
            others = [file for file in tmp_path.glob("works-*") if file != own and file.stat().st_mtime > begin]
            if row["id"] == "c" and number > 20 and others:  # alone it lives
                os.kill(os.getpid(), signal.SIGKILL)
            if row["id"] == "b" and number == 0 and (tmp_path / "bad").exists():
                raise ValueError("no such layer\nat all")
            after_step()

    found = {
        row["set"]: row
        for row in measure_together(ROWS, sets("ac", "bc", "ab"), settings(tmp_path, run))[1]
        if "set" in row
    }
    assert "c#0: the process was ended by SIGKILL" in found["ac"]["failed"] + found["bc"]["failed"]
    assert "c#0" in found["bc"]["failed"] and min(found["ab"]["steps"]) >= 4
    (tmp_path / "bad").touch()
    rows = list(measure_together(ROWS, sets("b"), settings(tmp_path, run))[1])
    assert [row["failed"] for row in rows] == ["b#0: ValueError: no such layer"] * 2
    (tmp_path / "bad").unlink()
    found = {
        row["set"]: row
        for row in measure_together(ROWS, sets("cb", "ba"), settings(tmp_path, run, rounds=1))[1]
        if "set" in row
    }
    assert "c#0" in found["cb"]["failed"] and len(found["ba"]["turns"]) == 2


def test_a_job_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes as soon as one hangs and the others have come to rest."""
    jobs: list[together.Resident] = []
    passed = [0]

    class Known(together.Resident):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            jobs.append(self)

    def now() -> float:
        if len(jobs) == 3 and all(job.is_resting for job in jobs if job.name != "b#0"):
            passed[0] = 3600
        return time.monotonic() + passed[0]

    monkeypatch.setattr(together, "Resident", Known)
    monkeypatch.setattr(together, "time", SimpleNamespace(monotonic=now, perf_counter=time.perf_counter))

    def run(row: dict[str, Any], after_step: Any) -> None:
        if row["id"] == "b":
            signal.pause()
        sleeping(row, after_step)

    found = list(measure_together(ROWS, sets("ab", "ac"), settings(tmp_path, run, timeout=60))[1])
    failed = {row.get("set"): row.get("failed") for row in found if "set" in row}
    assert failed == {"ab": "b#0: did not end a step in 60 s", "ac": None}


def test_a_killed_session_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """kill -9 in the middle, and a torn line: then every set is there once, and no process is left behind."""
    lines: list[dict[str, Any]] = [*ROWS, *({"set": one.id, "jobs": list(one.jobs)} for one in sets("ab", "bc", "ac"))]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    command = [sys.executable, "-c", SESSION, str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    said = [first.stdout.readline().strip() for _ in range(5)]
    assert said == ["left 3", "None", "None", "None", "ab"]
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    first.kill()
    first.communicate()
    deadline = time.monotonic() + 60
    while any(Path("/proc", child).exists() for child in children):
        assert len(children) == 3 and time.monotonic() < deadline
        time.sleep(0.01)
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"how": "time-slicing", "set": "bc", "jo')
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.stdout.split("\n")[0] == "left 2", second.stderr
    rows = list(read_rows(tmp_path / "out.jsonl"))
    assert sorted(row["set"] for row in rows if "set" in row) == ["ab", "ac", "bc"]
    assert sum("header" in row for row in rows) == 1


def test_sets_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    plan = settings(tmp_path, sleeping, total=8 * GIB)
    (row,) = measure_together(ROWS, sets("aabc"), plan)[1]
    assert row["failed"].startswith("needs about ") and row["failed"].endswith(" of 8.00 GiB")


def test_rounds_hold_what_fits() -> None:
    found = rounds(sets("ab", "ab", "aabb", "cc"), {"a": 10, "b": 10, "c": 30}, total=60, residents=4)
    assert [[one.id for one in part.sets] for part in found] == [["ab", "ab", "aabb"], ["cc"]]
    assert dict(found[0].copies) == {"a": 2, "b": 2}
    assert len(rounds(sets("ab", "c"), {"a": 1, "b": 1, "c": 1}, total=60, residents=2)) == 2


def test_drawn_sets_are_mostly_pairs_and_fit() -> None:
    rows = [{"id": f"j{number}", "model": "mlp:x", "need": (number % 9) * GIB} for number in range(80)]
    found = draw_sets(rows, 300, seed=4)
    assert found == draw_sets(rows, 300, seed=4) != draw_sets(rows, 300, seed=5)
    drawn = found[15:]
    assert {len(one.jobs) for one in drawn} == {2, 3, 5, 7}
    assert 0.5 < sum(len(one.jobs) == 2 for one in drawn) / len(drawn) < 0.7
    assert [len(one.jobs) for one in found[:5]] == [1, 2, 3, 5, 7] and len(set(found[4].jobs)) == 1
    takes = {str(row["id"]): together.room(row) for row in rows}
    assert len(rounds(found, takes, 130 * GIB)) <= 9  # sets of one pool share their processes
    with pytest.raises(UllageError, match="small enough"):
        draw_sets([{"id": "a", "model": "mlp:x", "need": 200 * GIB}], 3, seed=1)


def test_missing_parts_of_a_list_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="job in the set az"):
        measure_together(ROWS, sets("az"), settings(tmp_path, sleeping))
    with pytest.raises(UllageError, match="a list of ids"):
        sets_in([{"set": "x"}])
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = TogetherSettings(out=tmp_path / "out.jsonl", how=("mps",))
    with pytest.raises(UllageError, match="nvidia-cuda-mps-control"):
        list(measure_together(ROWS, sets("ab"), plan)[1])
