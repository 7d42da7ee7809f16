"""This machine's GPUs, seen through a stand-in for pynvml."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from ullage.hardware import gpu, local_gpus

MIB = 1024**2


class NVMLError(Exception):
    pass


@dataclass
class FakeDevice:
    name: str | bytes
    memory: int
    capability: tuple[int, int] | None = (8, 0)
    mig: "list[FakeDevice | None] | None" = None


@dataclass
class FakeNVML:
    devices: list[FakeDevice | None]
    driver: bool = True
    open: int = 0
    log: list[str] = field(default_factory=list)
    NVMLError = NVMLError

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        return _present(self.devices[index])

    def nvmlDeviceGetMigMode(self, device: FakeDevice) -> tuple[int, int]:
        if device.capability is None or device.capability < (8, 0):
            raise NVMLError("not supported")
        return (int(device.mig is not None),) * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeDevice) -> int:
        return len(device.mig or [])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeDevice, place: int) -> FakeDevice:
        return _present((device.mig or [])[place])

    def nvmlDeviceGetName(self, device: FakeDevice) -> str | bytes:
        return device.name

    def nvmlDeviceGetUUID(self, device: FakeDevice) -> str:
        return f"GPU-of-{device.memory}"

    def nvmlDeviceGetMemoryInfo(self, device: FakeDevice) -> SimpleNamespace:
        return SimpleNamespace(total=device.memory)

    def nvmlDeviceGetCudaComputeCapability(self, device: FakeDevice) -> tuple[int, int]:
        if device.capability is None:
            raise NVMLError("unknown")
        return device.capability


def _present(device: FakeDevice | None) -> FakeDevice:
    if device is None:
        raise NVMLError("not found")
    return device


def test_no_driver() -> None:
    assert local_gpus(FakeNVML([], driver=False)) == []


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert local_gpus() == []


def test_known_cards_keep_their_figures_and_order() -> None:
    nvml = FakeNVML([FakeDevice("NVIDIA H200", 143771 * MIB, (9, 0)), FakeDevice(b"Tesla T4", 15360 * MIB, (7, 5))])
    assert local_gpus(nvml) == [gpu("H200"), gpu("T4")]
    assert [card.uuid for card in local_gpus(nvml)] == [f"GPU-of-{143771 * MIB}", f"GPU-of-{15360 * MIB}"]
    assert gpu("H200").uuid is None
    assert nvml.open == 0


def test_the_name_without_nvidia_of_older_drivers() -> None:
    assert local_gpus(FakeNVML([FakeDevice("A100-SXM4-40GB", 40960 * MIB)])) == [gpu("A100-40GB")]


def test_the_memory_that_nvml_reports_counts() -> None:
    (card,) = local_gpus(FakeNVML([FakeDevice("Quadro RTX 8000", 46080 * MIB, (7, 5))]))
    assert card.name == "Quadro-RTX-8000" and card.memory == 46080 * MIB
    assert card.memory - card.usable == gpu("Quadro-RTX-8000").memory - gpu("Quadro-RTX-8000").usable


@pytest.mark.parametrize(("mib", "name"), [(8188, "RTX-4060-Ti-8GB"), (16380, "RTX-4060-Ti-16GB")])
def test_one_device_name_two_sizes(mib: int, name: str) -> None:
    nvml = FakeNVML([FakeDevice("NVIDIA GeForce RTX 4060 Ti", mib * MIB, (8, 9))])
    assert [card.name for card in local_gpus(nvml)] == [name]


def test_a_card_in_mig_mode_is_its_instances() -> None:
    instance = FakeDevice("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19968 * MIB)
    nvml = FakeNVML([FakeDevice("NVIDIA A100-SXM4-40GB", 40960 * MIB, mig=[instance, None, instance])])
    assert [card.name for card in local_gpus(nvml)] == ["A100-40GB-MIG-3g.20gb"] * 2


def test_an_unknown_card_is_what_nvml_says_and_none_otherwise() -> None:
    (card,) = local_gpus(FakeNVML([FakeDevice("NVIDIA Z9", 50000 * MIB, (8, 9))]))
    assert (card.name, card.memory, card.generation, card.source) == ("NVIDIA Z9", 50000 * MIB, "ada", "NVML")
    assert card.sms is None and card.bandwidth is None and card.fp16_tflops is None
    assert card.context == 580 * MIB and card.usable < card.memory and card.usable_source.startswith("derived")


def test_an_unknown_card_of_an_unknown_generation() -> None:
    (card,) = local_gpus(FakeNVML([FakeDevice("NVIDIA Z9", 50000 * MIB, None)]))
    assert card.generation is None and card.context is None and card.max_threads_per_sm is None
    (newer,) = local_gpus(FakeNVML([FakeDevice("NVIDIA Z10", 50000 * MIB, (99, 0))]))
    assert newer.compute_capability == (99, 0) and newer.generation is None and newer.context is None


def test_an_unreachable_gpu_is_left_out_and_nvml_closed() -> None:
    nvml = FakeNVML([None, FakeDevice("NVIDIA L4", 23034 * MIB, (8, 9))])
    assert [card.name for card in local_gpus(nvml)] == ["L4"]
    assert nvml.open == 0
