"""Activity of a GPU over a stretch of work, from two looks at its counters."""

import math

import pynvml
import pytest
from fake_nvml import BUSY, FakeGpu, FakeNvml

from ullage.errors import UnknownName
from ullage_lab.measure.activity import activity_between


class Clock:
    """Time that moves only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_means_of_the_stretch_come_out_in_our_units() -> None:
    gpu, clock = FakeGpu(), Clock()
    nvml = FakeNvml([gpu])
    with activity_between(0, nvml, clock) as activity:
        gpu.busy = dict(BUSY)
        gpu.energy_mj += 2_000_000
        clock.now += 4.0
    assert (activity.gract, activity.smact, activity.smocc) == pytest.approx((0.95, 0.615, 0.2225))
    assert (activity.drama, activity.tensor) == pytest.approx((0.40, 0.12))
    assert (activity.pcie_rx_bps, activity.pcie_tx_bps) == pytest.approx((100 * 2**20, 50 * 2**20))
    assert (activity.seconds, activity.energy_j, activity.power_w) == pytest.approx((4.0, 2000.0, 500.0))
    assert activity.clock_mhz == 1980
    assert activity.device == gpu.uuid
    assert activity.unknown_because is None


def test_nvml_gets_everything_back_also_after_an_error() -> None:
    nvml = FakeNvml([FakeGpu()])
    with pytest.raises(ValueError, match="training failed"), activity_between(0, nvml):
        raise ValueError("training failed")
    assert (nvml.samples, nvml.started) == (0, 0)


def test_a_gpu_before_hopper_has_power_and_no_activity() -> None:
    gpu, clock = FakeGpu(gpm=False), Clock()
    with activity_between(gpu.uuid, FakeNvml([gpu]), clock) as activity:
        clock.now += 2.0
        gpu.energy_mj += 300_000
    assert activity.smact is None
    assert activity.power_w == pytest.approx(150.0)
    assert "Hopper" in str(activity.unknown_because)


def test_a_metric_refused_by_nvml_is_unknown_and_others_remain() -> None:
    gpu, clock = FakeGpu(busy=dict(BUSY)), Clock()
    del gpu.busy[pynvml.NVML_GPM_METRIC_SM_OCCUPANCY]
    gpu.busy[pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL] = math.nan
    gpu.busy[pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL] = 100.4
    gpu.busy[pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL] = 4e9
    with activity_between(0, FakeNvml([gpu]), clock) as activity:
        clock.now += 1.0
    assert (activity.smocc, activity.drama, activity.gract) == (None, None, None)
    assert activity.tensor == 1.0
    assert activity.smact == pytest.approx(0.615)


def test_a_stretch_too_short_for_the_counters_is_unknown() -> None:
    clock = Clock()
    with activity_between(0, FakeNvml([FakeGpu(busy=dict(BUSY))]), clock) as activity:
        clock.now += 0.05
    assert (activity.smact, activity.power_w) == (None, None)
    assert activity.seconds == pytest.approx(0.05)
    assert "0.1 s" in str(activity.unknown_because)


def test_a_mig_instance_counts_by_itself_without_power() -> None:
    instance = FakeGpu(uuid="MIG-1", busy={pynvml.NVML_GPM_METRIC_SM_UTIL: 80.0}, instance_id=3)
    card, clock = FakeGpu(busy={pynvml.NVML_GPM_METRIC_SM_UTIL: 20.0}, instances=[instance]), Clock()
    with activity_between("MIG-1", FakeNvml([card]), clock) as activity:
        card.energy_mj += 1_000_000
        clock.now += 1.0
    assert activity.smact == pytest.approx(0.80)
    assert (activity.power_w, activity.energy_j) == (None, None)


def test_a_gpu_lost_during_readings_gives_unknowns_and_no_error() -> None:
    gpu, clock = FakeGpu(busy=dict(BUSY)), Clock()
    with activity_between(0, FakeNvml([gpu]), clock) as activity:
        gpu.errors["*"] = pynvml.NVML_ERROR_GPU_IS_LOST
        clock.now += 1.0
    assert (activity.smact, activity.power_w) == (None, None)
    assert "GPU is lost" in str(activity.unknown_because)


def test_without_a_driver_all_is_unknown_and_the_work_is_done() -> None:
    done = False
    with activity_between(0, FakeNvml([], init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)) as activity:
        done = True
    assert done
    assert (activity.smact, activity.power_w) == (None, None)
    assert "Driver Not Loaded" in str(activity.unknown_because)


def test_a_uuid_that_is_not_there_names_those_that_are() -> None:
    nvml = FakeNvml([FakeGpu(uuid="GPU-1234")])
    with pytest.raises(UnknownName, match="GPU-1234"), activity_between("GPU-1235", nvml):
        pass
    assert nvml.started == 0
