"""DCGM's activity, from a program that prints what `dcgmi` prints; it is a real child process."""

import os
import stat
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml

from ullage.errors import NoGPUSource
from ullage.manager.monitor.dcgm import DcgmSource, parse_row
from ullage.manager.monitor.nvml import NvmlSource
from ullage.manager.monitor.sources import best_source

GPU_A, GPU_B = "GPU-aaaa1111-0000-0000-0000-000000000000", "GPU-bbbb2222-0000-0000-0000-000000000000"

PROGRAM = """\
    #!{python}
    import os, sys, time
    words = sys.argv[1:]
    with open({log!r}, "a") as log:
        print(*words, file=log)
    if words == ["discovery", "-l"]:
        if {broken!r}:
            print("Error: unable to establish a connection to the specified host: localhost")
            sys.exit(1)
        print("2 GPUs found.")
        print("+--------+----------------------------------------------------------------------+")
        print("| GPU ID | Device Information                                                   |")
        print("+--------+----------------------------------------------------------------------+")
        for number, uuid in enumerate([{a!r}, {b!r}]):
            print(f"| {{number:<6}} | Name: NVIDIA A100-SXM4-40GB                                          |")
            print("|        | PCI Bus ID: 00000000:0F:00.0                                         |")
            print(f"|        | Device UUID: {{uuid:<56}}|")
            print("+--------+----------------------------------------------------------------------+")
        print("0 NvSwitches found.")
    elif words == ["discovery", "-c"]:
        print("| Instance Hierarchy                                                |")
        print("| GPU 1             | GPU {b} (EntityID: 1) |")
        print("| -> I 1/2          | GPU Instance (EntityID: 7)                    |")
        print("|    -> CI 1/2/0    | Compute Instance (EntityID: 7)                |")
    else:
        assert words[0] == "dmon", words
        print("#Entity   GRACT      SMACT      SMOCC      TENSO      DRAMA      PCITX       PCIRX", flush=True)
        print("ID                                                                       ", flush=True)
        while True:
            print("GPU 0     0.951      0.615      0.222      0.120      0.400      52428800    104857600")
            print("GPU 1     N/A        N/A        N/A        N/A        N/A        N/A         N/A")
            print("GPU-I 7   0.500      0.250      0.125      N/A        0.062      N/A         123456...", flush=True)
            if {short!r}:
                print("Error getting values information. Return -7: connection lost", flush=True)
                sys.exit(1)
            time.sleep(0.05)
"""


@pytest.fixture
def dcgmi(tmp_path: Path) -> Callable[..., str]:
    def made(broken: bool = False, short: bool = False) -> str:
        program = tmp_path / "dcgmi"
        text = textwrap.dedent(PROGRAM).format(
            python=sys.executable, log=str(tmp_path / "log"), broken=broken, short=short, a=GPU_A, b=GPU_B
        )
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return str(program)

    return made


def nvml(instances: bool = False) -> FakeNvml:
    parts = [FakeGpu(uuid="MIG-1", instance_id=2, gpm=False)] if instances else []
    return FakeNvml([FakeGpu(uuid=GPU_A, gpm=False), FakeGpu(uuid=GPU_B, gpm=False, instances=parts)])


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.01)


def test_dcgms_activity_is_put_into_nvmls_readings(dcgmi: Callable[..., str]) -> None:
    source = DcgmSource(NvmlSource(nvml()), interval=0.2, command=dcgmi())
    try:
        eventually(lambda: source.read(GPU_A).smact is not None)
        reading = source.read(GPU_A)
        assert (reading.gract, reading.smact, reading.smocc) == (0.951, 0.615, 0.222)
        assert (reading.tensor, reading.drama) == (0.120, 0.400)
        assert (reading.pcie_tx_bps, reading.pcie_rx_bps) == (52428800, 104857600)
        assert (reading.memory_used, reading.temperature_c) == (10 * GIB, 41)
        assert source.read(GPU_B).smact is None, "N/A is unknown"
    finally:
        source.close()


def test_an_instance_is_found_by_its_parent_and_number(dcgmi: Callable[..., str], tmp_path: Path) -> None:
    source = DcgmSource(NvmlSource(nvml(instances=True)), interval=0.2, command=dcgmi())
    try:
        eventually(lambda: source.read("MIG-1").smact is not None)
        reading = source.read("MIG-1")
        assert (reading.gract, reading.smact, reading.smocc, reading.drama) == (0.5, 0.25, 0.125, 0.062)
        assert reading.pcie_rx_bps is None, "a figure that was cut is no figure"
        assert "-i 0,1,i:7" in (tmp_path / "log").read_text()
    finally:
        source.close()


def test_the_child_ends_with_the_source(dcgmi: Callable[..., str]) -> None:
    source = DcgmSource(NvmlSource(nvml()), interval=0.2, command=dcgmi())
    child = source._child
    assert child is not None and child.poll() is None
    source.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_dead_child_makes_activity_unknown_with_a_hint(
    dcgmi: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = DcgmSource(NvmlSource(nvml()), interval=0.2, command=dcgmi(short=True))
    try:
        eventually(lambda: source.read(GPU_A).smact is not None)
        eventually(lambda: source.hint is not None and "connection lost" in source.hint)
        late = time.monotonic() + 5
        monkeypatch.setattr("ullage.manager.monitor.dcgm.time.monotonic", lambda: late)
        assert source.read(GPU_A).smact is None
        assert source.read(GPU_A).memory_used == 10 * GIB
    finally:
        source.close()


def test_the_best_source_is_nvml_where_all_gpus_have_gpm(dcgmi: Callable[..., str]) -> None:
    source = best_source(nvml=FakeNvml([FakeGpu()]), dcgmi=dcgmi())
    assert source.name == "nvml"


def test_dcgm_is_preferred_on_older_gpus_and_nvml_without_it(dcgmi: Callable[..., str]) -> None:
    source = best_source(nvml=nvml(), dcgmi=dcgmi(), interval=0.2)
    assert source.name == "dcgm"
    source.close()
    assert best_source(nvml=nvml(), dcgmi=dcgmi(broken=True)).name == "nvml"
    assert best_source(nvml=nvml(), dcgmi="/no/such/dcgmi").name == "nvml"


def test_a_missing_host_engine_is_reported_with_a_command(dcgmi: Callable[..., str]) -> None:
    with pytest.raises(NoGPUSource, match="unable to establish a connection.*systemctl status nvidia-dcgm"):
        DcgmSource(NvmlSource(nvml()), command=dcgmi(broken=True))


@pytest.mark.parametrize("line", ["", "#Entity GRACT", "ID", "Error setting watches", "GPU 0 1 2", "GPU 0"])
def test_a_line_that_is_no_row_is_passed_over(line: str) -> None:
    assert parse_row(line) is None


def test_impossible_shares_are_unknown() -> None:
    row = parse_row("GPU 3 1.02 7.5 -0.1 nan 0 9 1e12")
    assert row is not None
    entity, busy = row
    assert entity == ("GPU", 3)
    assert (busy.gract, busy.smact, busy.smocc, busy.tensor, busy.drama) == (1.0, None, None, None, 0.0)
