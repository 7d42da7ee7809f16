"""Scripts that submit `.rad` files with `sleep` between, as the authors of RAD-RM published them: read, never run."""

from pathlib import Path

import pytest

from ullage.errors import UllageError
from ullage.manager.simulation.known import known_workload
from ullage.manager.simulation.reading import read_trace
from ullage.units import MIB

SHIPPED = Path(__file__).resolve().parents[3] / "examples/carma"
SUBMIT = "python src/submit.py --task workloads/{}.rad\n"


def write_rad(folder: Path, name: str, command: str, *lines: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.rad").write_text("\n".join(["conda activate tf", f"python {command}", *map(str, lines)]) + "\n")


def write_script(folder: Path, text: str) -> Path:
    path = folder / "trace.sh"
    path.write_text(text)
    return path


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A folder with two job files."""
    net, large = "resnet18_cifar100.py --batch_size 32 --epochs 50", "gpt2_large_on_wiki.py"
    write_rad(tmp_path / "workloads", "net", net, "net.model", "cifar100", 32, "exclusive", 1, 788, 2231.5, 53.9, 8000)
    write_rad(tmp_path / "workloads", "large", large, "l.model", "wiki", 8, "exclusive", 2, 28356, 40000, 40000, 40000)
    return tmp_path


def test_sleeps_are_arrivals_and_files_are_jobs(jobs: Path) -> None:
    text = f"# two jobs\n{SUBMIT.format('net')}sleep 73\n\n{SUBMIT.format('large')}sleep 1.5\nsleep 2\n"
    trace = read_trace(write_script(jobs, text + SUBMIT.format("net").rstrip()))
    assert [job.arrival for job in trace.jobs] == [0.0, 73.0, 76.5]
    net, large, again = trace.jobs
    assert net.kind is again.kind and (net.gpus, large.gpus) == (1, 2)
    assert net.kind.memory == 788 * MIB and large.kind.memory == 28356 * MIB
    assert net.kind.estimates["horus"] == 2231 * MIB and net.kind.estimates["gpumemnet"] == 8000 * MIB
    known = known_workload("resnet18 cifar100 b32")
    assert net.kind.name == known.name and net.kind.alone == known.kind.alone
    assert net.work_s == pytest.approx(50 * known.epoch_s)
    assert large.work_s == pytest.approx(known_workload("gpt2_large b8").epoch_s)


@pytest.mark.parametrize(("file", "jobs", "last"), [("heavy-60-tasks", 60, 8966.0), ("mix-90-tasks", 90, 12514.0)])
def test_the_published_traces_are_read_whole(file: str, jobs: int, last: float) -> None:
    trace = read_trace(SHIPPED / f"philly_{file}.sh")
    assert len(trace.jobs) == jobs and trace.jobs[-1].arrival == last
    assert all(kind.alone["A100-40GB"].step_s > 0 for kind in trace.kinds)
    assert all({"horus", "faketensor", "gpumemnet", "ullage"} <= set(kind.estimates) for kind in trace.kinds)
    assert any("40,000 MiB is the authors' cap" in note for note in trace.notes)
    small = [job for job in trace.jobs if job.kind.name == "mnist b32"]
    assert len(small) == (7 if jobs == 60 else 1)


def test_files_are_beside_the_script_whatever_its_paths(jobs: Path) -> None:
    (jobs / "workloads/net.rad").rename(jobs / "net.rad")
    elsewhere = "python3 /home/them/src/submit.py --task /home/them/rad/workloads/{}.rad\n"
    trace = read_trace(write_script(jobs, elsewhere.format("net") + elsewhere.format("large")))
    assert [job.gpus for job in trace.jobs] == [1, 2]


def test_a_job_of_unknown_length_is_counted_and_left_out(jobs: Path) -> None:
    write_rad(jobs, "other", "own_net.py", "own.model", "data", 32, "exclusive", 1, 788)
    trace = read_trace(write_script(jobs, SUBMIT.format("net") + SUBMIT.format("other")))
    assert len(trace.jobs) == 1 and any("1 job is left out" in note and "other.rad" in note for note in trace.notes)


@pytest.mark.parametrize(
    "line",
    [
        "touch ran",
        "sleep $(touch ran)",
        "sleep 1; touch ran",
        "sleep 1000000000",
        "sleep 1e9",
        "sleep -1",
        "sleep infinity",
        "while true; do sleep 1; done",
        "`touch ran`",
        "python src/submit.py --task workloads/net.rad; touch ran",
        "python src/submit.py --task workloads/net.rad & touch ran",
        "python src/submit.py --task $(touch ran).rad",
        "python src/submit.py --task ../workloads/net.rad",
        "python src/submit.py --task workloads/../../net.rad",
        "python src/submit.py --task /etc/passwd",
        "python src/submit.py --task missing.rad",
        "source ./other.sh",
        "sleep \x07",
    ],
)
def test_other_lines_are_refused_in_one_line(jobs: Path, line: str) -> None:
    script = write_script(jobs, SUBMIT.format("net") + line + "\n")
    with pytest.raises(UllageError) as refused:
        read_trace(script)
    assert "line 2" in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert not list(jobs.glob("**/ran"))


def test_binary_files_and_scripts_without_jobs_are_refused(jobs: Path) -> None:
    for content in (b"\x7fELF\xff\xfe", b"#!/bin/sh\nrm -rf nothing\n", SUBMIT.format("net").encode() + b"\xff\n"):
        (jobs / "trace.sh").write_bytes(content)
        with pytest.raises(UllageError) as refused:
            read_trace(jobs / "trace.sh")
        assert "\n" not in str(refused.value)


def test_a_damaged_job_file_is_named(jobs: Path) -> None:
    write_rad(jobs / "workloads", "net", "x.py", "m", "d", 32, "exclusive", 1, "much")
    with pytest.raises(UllageError, match=r"net.rad, line 8: measured must be memory in MiB such as 8000, got 'much'"):
        read_trace(write_script(jobs, SUBMIT.format("net")))
