"""Virtual cards as a source: real files, real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.errors import DeviceLost, NoGPUSource
from ullage.manager.monitor.sampling import Monitor
from ullage.manager.monitor.sources import VirtualSource, best_source
from ullage.virtual.shared_card.cards import Cards, DeclaredActivity

TAKES = "import sys; from ullage.virtual.shared_card.cards import Cards; card = Cards.open(sys.argv[1]).cards[0]; "
TAKES += "print(card.take(int(sys.argv[2])), flush=True); sys.stdin.read()"


def test_memory_and_processes_are_known_and_activity_is_not(tmp_path: Path) -> None:
    card = Cards.create(tmp_path, "2xA100-40GB").cards[1]
    card.take(3 << 30)
    source = VirtualSource(tmp_path)
    one, two = source.devices()
    reading = source.read(two.id)
    assert (one.index, two.index, two.id, two.name, two.total) == (0, 1, card.uuid, "A100-40GB", card.total)
    assert (reading.memory_used, reading.memory_total) == (3 << 30, card.total)
    assert source.processes(two.id) == {os.getpid(): 3 << 30}
    assert source.processes(one.id) == {}
    assert source.read(one.id).memory_used == 0
    unknown = ("gract", "smact", "smocc", "drama", "tensor", "power_w", "energy_j", "temperature_c", "pcie_rx_bps")
    assert {getattr(reading, name) for name in unknown} == {None}
    card.give(3 << 30)


def test_activity_is_the_sum_of_what_processes_declare(tmp_path: Path) -> None:
    card = Cards.create(tmp_path, "T4").cards[0]
    source = VirtualSource(tmp_path)
    assert (source.read(card.uuid).smact, source.read(card.uuid).utilization) == (0.0, 0.0)
    card.declare(DeclaredActivity(0.5, 0.3))  # it holds nothing, so it does nothing
    assert source.read(card.uuid).smact == 0.0
    card.take(1 << 30)
    card.declare(DeclaredActivity(0.7, 0.456))
    card.take(1 << 30)
    reading = source.read(card.uuid)
    assert (reading.smact, reading.gract, reading.utilization, reading.memory_used) == (0.456, 0.7, 0.7, 2 << 30)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen([sys.executable, "-c", TAKES, str(tmp_path), str(1 << 30)], **pipes)
    assert other.stdout.readline() == b"True\n"
    assert source.read(card.uuid).smact is None  # one of the two is unknown
    source.predicted = lambda pid, gpu: DeclaredActivity(0.9, 0.1) if (pid, gpu) == (other.pid, "T4") else None
    reading = source.read(card.uuid)
    assert (round(reading.smact, 3), reading.gract) == (0.556, 1.0)
    other.communicate()
    assert source.read(card.uuid).smact == 0.456
    card.give(2 << 30)


def test_a_killed_process_holds_nothing_any_more(tmp_path: Path) -> None:
    card = Cards.create(tmp_path, "T4").cards[0]
    job = subprocess.Popen(
        [sys.executable, "-c", TAKES, str(tmp_path), str(1 << 30)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert job.stdout is not None and job.stdout.readline() == b"True\n"
    source = VirtualSource(tmp_path)
    assert source.processes(card.uuid) == {job.pid: 1 << 30}
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    assert source.processes(card.uuid) == {}
    assert source.read(card.uuid).memory_used == 0


def test_card_whose_file_vanishes_is_lost_and_the_others_go_on(tmp_path: Path) -> None:
    one, two = Cards.create(tmp_path, "2xT4").cards
    monitor = Monitor(best_source(virtual=tmp_path))
    monitor.look()
    two.path.unlink()
    monitor.look()
    assert "No such file" in str(monitor.lost(two.uuid))
    assert monitor.latest(two.uuid) is None
    assert monitor.latest(one.uuid) is not None
    with pytest.raises(DeviceLost):
        monitor.source.read(two.uuid)


def test_a_folder_without_cards_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(NoGPUSource, match="ullage serve --virtual"):
        best_source(virtual=tmp_path / "nothing")
