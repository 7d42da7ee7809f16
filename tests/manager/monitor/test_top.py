"""`ullage top` on virtual cards and on stand-ins for NVML's GPUs."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import BUSY, GIB, FakeGpu, FakeNvml
from rich.console import Console

from ullage.cli.monitor import view
from ullage.manager.monitor.nvml import NvmlSource
from ullage.manager.monitor.readings import AT_EVERY_LOOK
from ullage.manager.monitor.sampling import Monitor, snapshot
from ullage.virtual.shared_card.cards import Cards


def top(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ullage", "top", *words], capture_output=True, text=True, timeout=60, **more
    )


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    folder = tmp_path / "cards"
    Cards.create(folder, "2xA100-40GB").cards[0].take(5 << 30)
    return folder


def drawn(monitor: Monitor, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(view(snapshot(monitor), width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def a_mixed_machine() -> Monitor:
    """An H200 with GPM, an A100, an H200 in MIG mode, and one that is lost."""
    part = FakeGpu(uuid="MIG-1", name="NVIDIA H200 MIG 1g.18gb", total=16 * GIB, reserved=0, used=GIB, instance_id=1)
    gpus = [
        FakeGpu(uuid="GPU-a", busy=dict(BUSY), used=60 * GIB, compute={os.getpid(): 50 * GIB, 99_999_999: None}),
        FakeGpu(uuid="GPU-b", name="NVIDIA A100-SXM4-80GB", gpm=False, total=80 * GIB, used=77 * GIB),
        FakeGpu(uuid="GPU-c", instances=[part]),
        FakeGpu(uuid="GPU-d"),
    ]
    monitor = Monitor(NvmlSource(FakeNvml(gpus), AT_EVERY_LOOK), host_interval=0.0)
    monitor.look()
    gpus[3].errors["*"] = pynvml.NVML_ERROR_GPU_IS_LOST
    time.sleep(0.11)  # GPM's counters are read over a tenth of a second at least
    monitor.look()
    return monitor


def test_picture_shows_what_is_known_and_a_dash_for_the_rest() -> None:
    lines = drawn(a_mixed_machine(), 140)
    titles = lines[1].split()
    first, second, third, part, gone = (line.split() for line in lines[2:7])
    assert titles[:3] == ["GPU", "memory", "GiB"]
    assert first[3:] == ["60.0/139", "95%", "62%", "22%", "40%", "300W", "12%", "41°C", "105M/52M", "1980/3201", "97%"]
    assert second[3:8] == ["77.0/79.0", "-", "-", "-", "-"]
    assert third[1] == "H200" and part[:3] == ["└", "MIG", "1g.18gb"]
    assert gone[:3] == ["3", "H200", "lost"] and set(gone[3:]) == {"-"}
    pids = {line.split()[1]: line.split() for line in lines if str(os.getpid()) in line or "99999999" in line}
    assert pids["99999999"][2:] == ["-"] * 5, "a process of another container has no name, and no memory is told"
    assert pids[str(os.getpid())][3] == "50.0"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(a_mixed_machine(), width)
    assert max(len(line) for line in lines) <= width
    assert any("SMACT" in line for line in lines) or width < 60


def test_a_low_terminal_says_how_many_processes_it_leaves_out() -> None:
    gpu = FakeGpu(compute={pid: GIB for pid in range(90_000_000, 90_000_050)})
    monitor = Monitor(NvmlSource(FakeNvml([gpu])), host_interval=0.0)
    monitor.look()
    lines = drawn(monitor, 80, height=20)
    assert len(lines) <= 20
    shown = sum(line.split()[1:2] != [] and line.split()[1].startswith("900000") for line in lines)
    assert any(f"and {50 - shown} more" in line for line in lines)


def test_a_process_cannot_write_to_the_terminal_by_its_name() -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", "input()", "\x1b[2Jgone\nnext line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        monitor = Monitor(NvmlSource(FakeNvml([FakeGpu(compute={job.pid: GIB})])), host_interval=0.0)
        monitor.look()
        text = "\n".join(drawn(monitor, 200))
        assert "\x1b" not in text
        assert "?[2Jgone next line" in text
    finally:
        job.communicate(b"\n")


def test_once_prints_one_picture(cards: Path) -> None:
    done = top("--once", "--cards", str(cards), "--interval", "100ms")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SMACT") == 1
    assert "5.00/39.4" in done.stdout
    assert str(os.getpid()) in done.stdout


def test_json_is_one_reading_with_null_for_unknown(cards: Path) -> None:
    done = top("--json", "--cards", str(cards), "--interval", "100ms")
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["source"], len(found["gpus"])) == ("virtual", 2)
    gpu = found["gpus"][0]
    assert (gpu["memory_used"], gpu["smact"], gpu["power_w"], gpu["lost"]) == (5 << 30, None, None, None)
    (process,) = gpu["processes"]
    assert (process["pid"], process["memory"]) == (os.getpid(), 5 << 30)
    assert process["ram"] > 1 << 20 and process["cpu"] is not None


def test_watch_gives_a_line_a_reading_and_record_keeps_them(cards: Path, tmp_path: Path) -> None:
    file = tmp_path / "readings.jsonl"
    words = ("--cards", str(cards), "--interval", "100ms", "--record", str(file))
    done = top("--json", "--watch", "--count", "3", *words)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines
    assert len(lines) == 3 and lines[0]["time"] < lines[1]["time"] < lines[2]["time"]
    silent = top("--count", "2", *words)
    assert (silent.returncode, silent.stdout) == (0, ""), "without a terminal it only records"
    assert len(file.read_text().splitlines()) == 5


def test_ctrl_c_ends_the_live_view_and_gives_the_terminal_back(cards: Path) -> None:
    _ends_cleanly(cards, signal.SIGINT)


@pytest.mark.slow
def test_a_polite_kill_also_ends_it_next_to_its_script(cards: Path) -> None:
    _ends_cleanly(cards, signal.SIGTERM, on_interrupt=signal.SIG_IGN)


def _ends_cleanly(cards: Path, how: signal.Signals, on_interrupt: signal.Handlers = signal.SIG_DFL) -> None:
    master, slave = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-m", "ullage", "top", "--cards", str(cards), "--interval", "100ms"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        preexec_fn=partial(signal.signal, signal.SIGINT, on_interrupt),
    )
    os.close(slave)
    said = _read_until(master, b"SMACT")
    job.send_signal(how)
    said += _read_until(master, b"\x1b[?1049l")
    assert job.wait(timeout=60) == 0
    assert b"Traceback" not in said
    os.close(master)


def _read_until(master: int, wanted: bytes) -> bytes:
    said, deadline = b"", time.monotonic() + 60
    while wanted not in said:
        assert time.monotonic() < deadline, said
        if select.select([master], [], [], 0.2)[0]:
            said += os.read(master, 65536)
    return said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--interval", "1ms"), "--interval must be from 0.1s to 1h, got '1ms'"),
        (("--interval", "often"), "duration must look like"),
        (("--once", "--watch"), "--once prints one reading"),
        (("--cards", "/no/such/folder"), "must be a folder of virtual cards"),
        (
            ("--cards", "/no/such/folder", "--record", "/no/such/file"),
            "must be a writable file, got /no/such/file",
        ),
    ],
)
def test_impossible_commands_are_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    done = top(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_without_a_driver_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        done = top("--once")
        assert done.returncode == 1
        assert "--cards FOLDER" in done.stderr and len(done.stderr.splitlines()) == 1
    else:
        pytest.skip("this machine has an NVIDIA driver")


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="a machine with a GPU shows that")
def test_without_a_gpu_the_cards_of_the_daemon_are_found(tmp_path: Path) -> None:
    Cards.create(tmp_path / "cards" / "serve", "3xA100-40GB")
    found = top("--once", "--json", env={**os.environ, "ULLAGE_HOME": str(tmp_path)})
    assert found.returncode == 0, found.stderr
    assert len(json.loads(found.stdout)["gpus"]) == 3
