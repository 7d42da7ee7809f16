"""NVML's readings, seen through a stand-in with pynvml's own structures and error codes."""

import pynvml
import pytest
from fake_nvml import BUSY, GIB, FakeGpu, FakeNvml

from ullage.errors import DeviceLost, NoGPUSource
from ullage.manager.monitor.nvml import SHORTEST, GpmCounter, NvmlSource
from ullage.manager.monitor.readings import RATES


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_gpu_before_hopper_gives_all_but_activity() -> None:
    gpu = FakeGpu(gpm=False)
    source = NvmlSource(FakeNvml([gpu]))
    (device,) = source.devices()
    reading = source.read(device.id)
    assert (device.name, device.index, device.total) == ("NVIDIA H200", 0, 139 * GIB)
    assert (reading.memory_used, reading.memory_total) == (10 * GIB, 139 * GIB)
    assert (reading.gract, reading.smact, reading.smocc, reading.drama, reading.tensor) == (None,) * 5
    assert (reading.power_w, reading.energy_j, reading.temperature_c) == pytest.approx((300.0, 1000.0, 41))
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz, reading.utilization) == (1980, 3201, 0.97)
    assert "DCGM" in str(source.hint)


def test_gpm_gives_activity_between_two_looks() -> None:
    gpu, clock = FakeGpu(busy=dict(BUSY)), Clock()
    nvml = FakeNvml([gpu], started=1)
    counter = GpmCounter(nvml, gpu, clock=clock)
    assert counter.read().smact is None, "no time has gone by"
    clock.now += 1.0
    assert counter.read().smact == pytest.approx(0.615)
    gpu.busy = {pynvml.NVML_GPM_METRIC_SM_UTIL: 10.0}
    clock.now += SHORTEST / 2
    assert counter.read().smact == pytest.approx(0.615), "the counters have not moved on yet"
    clock.now += 1.0
    assert (counter.read().smact, counter.read().gract) == (pytest.approx(0.10), None)
    counter.close()
    assert nvml.samples == 0


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_UNKNOWN]
)
@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_j"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz"),
        ("nvmlDeviceGetUtilizationRates", "utilization"),
    ],
)
def test_one_refused_value_is_unknown_and_the_others_are_there(function: str, field: str, code: int) -> None:
    gpu = FakeGpu()
    source = NvmlSource(FakeNvml([gpu]))
    source.devices()
    gpu.errors[function] = code
    reading = source.read(gpu.uuid)
    assert getattr(reading, field) is None
    assert reading.memory_used == 10 * GIB


def test_an_older_driver_counts_its_own_share_as_used() -> None:
    gpu = FakeGpu(errors={"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
    reading = NvmlSource(FakeNvml([gpu])).read(gpu.uuid)
    assert (reading.memory_used, reading.memory_total) == (11 * GIB, 140 * GIB)


def test_memory_that_nvml_does_not_give_is_unknown() -> None:
    refused = pynvml.NVML_ERROR_NOT_SUPPORTED  # as on GPUs that share the CPU's memory
    gpu = FakeGpu(errors={"nvmlDeviceGetMemoryInfo_v2": refused, "nvmlDeviceGetMemoryInfo": refused})
    source = NvmlSource(FakeNvml([gpu]))
    assert source.devices()[0].total is None
    assert source.read(gpu.uuid).memory_used is None


def test_pcie_traffic_of_older_gpus_comes_from_counters() -> None:
    gpu, clock = FakeGpu(gpm=False), Clock()
    source = NvmlSource(FakeNvml([gpu]), clock=clock)
    assert source.read(gpu.uuid).pcie_rx_bps is None, "one look at a counter is no rate"
    clock.now += 1.0
    gpu.pcie_bytes = (500_000, 100_000)
    reading = source.read(gpu.uuid)
    assert (reading.pcie_rx_bps, reading.pcie_tx_bps) == (500_000, 100_000), "the second one need not wait"
    clock.now += 1.0
    assert source.read(gpu.uuid).ages["pcie_rx_bps"] == 1.0
    clock.now += RATES["pcie"]
    gpu.pcie_bytes = (0, 0)
    assert source.read(gpu.uuid).pcie_rx_bps is None, "a counter that starts again is no negative rate"
    clock.now += RATES["pcie"]
    gpu.pcie_bytes = None
    assert source.read(gpu.uuid).pcie_rx_bps is None


def test_values_are_read_at_their_rate_and_repeated_with_age() -> None:
    gpu, clock = FakeGpu(), Clock()
    nvml = FakeNvml([gpu])
    source = NvmlSource(nvml, rates={"temperature": 10.0, "clocks": 3.0, "memory": 0.0}, clock=clock)
    first = source.read(gpu.uuid)
    assert (first.temperature_c, first.ages) == (41, {})
    gpu.used = 20 * GIB
    for _ in range(5):
        clock.now += 1.0
        reading = source.read(gpu.uuid)
    assert (reading.memory_used, reading.temperature_c, reading.sm_clock_mhz) == (20 * GIB, 41, 1980)
    assert (reading.ages["temperature_c"], reading.ages["sm_clock_mhz"]) == (5.0, 2.0)
    assert "memory_used" not in reading.ages
    assert nvml.calls["nvmlDeviceGetTemperature"] == 1
    assert nvml.calls["nvmlDeviceGetClockInfo"] == 2 * 2


def test_a_refused_value_is_unknown_instead_of_the_last_one() -> None:
    gpu, clock = FakeGpu(), Clock()
    source = NvmlSource(FakeNvml([gpu]), clock=clock)
    assert source.read(gpu.uuid).temperature_c == 41
    gpu.errors["nvmlDeviceGetTemperature"] = pynvml.NVML_ERROR_UNKNOWN
    clock.now += RATES["temperature"]
    reading = source.read(gpu.uuid)
    assert (reading.temperature_c, reading.ages.get("temperature_c")) == (None, None)


def test_slow_calls_are_rare_and_their_values_have_an_age() -> None:
    gpu, clock = FakeGpu(busy=dict(BUSY), power_mw=300_000, energy_mj=1_000_000), Clock()
    nvml = FakeNvml([gpu])
    source = NvmlSource(nvml, clock=clock)
    source.read(gpu.uuid)
    nvml.calls.clear()
    gpu.power_mw, gpu.energy_mj = 250_000, 1_500_000
    for _ in range(28):
        clock.now += 1.0
        last = source.read(gpu.uuid)
    assert (last.power_w, last.energy_j, last.ages["energy_j"]) == (250.0, 1000.0, 28.0)
    assert "power_w" not in last.ages
    assert "nvmlDeviceGetTotalEnergyConsumption" not in nvml.calls and nvml.calls.get("nvmlGpmSampleGet", 0) <= 10
    clock.now += 2.0
    assert source.read(gpu.uuid).energy_j == 1500.0


def test_gpm_gives_pcie_traffic_without_another_call() -> None:
    gpu, clock = FakeGpu(busy=dict(BUSY)), Clock()
    nvml = FakeNvml([gpu])
    source = NvmlSource(nvml, clock=clock)
    for _ in range(30):
        clock.now += 1.0
        source.read(gpu.uuid)
    assert "nvmlDeviceGetFieldValues" not in nvml.calls
    assert nvml.calls["nvmlGpmSampleGet"] > 0


def test_listing_again_asks_no_names_of_known_gpus() -> None:
    nvml = FakeNvml([FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")])
    source = NvmlSource(nvml)
    assert source.devices() == source.devices()
    assert (nvml.calls["nvmlDeviceGetName"], nvml.calls["nvmlGpmQueryDeviceSupport"]) == (2, 2)


def test_a_lost_gpu_is_reported_and_left_out_of_the_list() -> None:
    gpus = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")]
    source = NvmlSource(FakeNvml(gpus))
    assert [device.id for device in source.devices()] == ["GPU-a", "GPU-b"]
    gpus[0].errors["*"] = pynvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(DeviceLost, match="GPU is lost"):
        source.read("GPU-a")
    with pytest.raises(DeviceLost):
        source.processes("GPU-a")
    assert source.read("GPU-b").memory_used == 10 * GIB
    assert [device.id for device in source.devices()] == ["GPU-b"]
    with pytest.raises(DeviceLost, match="does not list it"):
        source.read("GPU-a")


def test_processes_of_all_lists_are_together_and_counted_once() -> None:
    gpu = FakeGpu(compute={10: 4 * GIB, 11: None}, graphics={10: 4 * GIB, 12: 1 * GIB}, mps={13: 2 * GIB})
    found = NvmlSource(FakeNvml([gpu])).processes(gpu.uuid)
    assert found == {10: 4 * GIB, 11: None, 12: 1 * GIB, 13: 2 * GIB}


def test_processes_unknown_to_nvml_are_unknown_not_absent() -> None:
    refused = pynvml.NVML_ERROR_NO_PERMISSION
    names = ("Compute", "MPSCompute", "Graphics")
    gpu = FakeGpu(errors={f"nvmlDeviceGet{name}RunningProcesses": refused for name in names})
    source = NvmlSource(FakeNvml([gpu]))
    assert source.processes(gpu.uuid) is None
    gpu.errors.clear()
    assert source.processes(gpu.uuid) == {}


def test_mig_instances_come_with_their_parent() -> None:
    parts = [
        FakeGpu(
            uuid=f"MIG-{number}",
            name="NVIDIA H200 MIG 1g.18gb",
            total=16 * GIB,
            reserved=0,
            used=number * GIB,
            instance_id=number,
            compute={100 + number: GIB},
        )
        for number in (1, 2)
    ]
    source = NvmlSource(FakeNvml([FakeGpu(uuid="GPU-a", instances=parts), FakeGpu(uuid="GPU-b")]))
    card, one, two, whole = source.devices()
    assert (card.id, card.divided, card.takes_jobs, card.parent) == ("GPU-a", True, False, None)
    assert (one.id, one.mig, one.parent, one.instance, one.takes_jobs) == ("MIG-1", True, "GPU-a", 1, True)
    assert (two.id, two.total, whole.id, whole.mig, whole.divided) == ("MIG-2", 16 * GIB, "GPU-b", False, False)
    reading = source.read("MIG-2")
    assert (reading.memory_used, reading.power_w, reading.temperature_c) == (2 * GIB, None, None)
    assert source.processes("MIG-2") == {102: GIB}
    assert source.hint is None, "all that jobs run on have GPM"


def test_an_instance_that_is_destroyed_is_gone_from_the_list() -> None:
    card = FakeGpu(uuid="GPU-a", instances=[FakeGpu(uuid="MIG-1", instance_id=1)])
    nvml = FakeNvml([card])
    source = NvmlSource(nvml)
    source.devices()
    card.instances.clear()
    (device,) = source.devices()
    assert (device.id, device.divided) == ("GPU-a", False)
    source.close()
    assert (nvml.samples, nvml.started) == (0, 0)


def test_without_a_driver_one_message_says_so() -> None:
    with pytest.raises(NoGPUSource, match="Driver Not Loaded.*nvidia-smi"):
        NvmlSource(FakeNvml([], init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
