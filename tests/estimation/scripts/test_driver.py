"""Scripts that ask the NVIDIA driver beside PyTorch: `nvidia-smi` and NVML."""

import os

import pytest

TRAIN = """
import os, subprocess, torch
def train():
    model = torch.nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad(); model(torch.randn(8, 4096, device="cuda")).sum().backward(); optimizer.step()
def smi(words):
    return subprocess.check_output("nvidia-smi " + words, shell=True, text=True)
"""
NVML = TRAIN + "pynvml = __import__('pynvml')\npynvml.nvmlInit()\nhandle = pynvml.nvmlDeviceGetHandleByIndex(0)\n"


def run(follow, source):
    answer = follow(source, gpu="RTX-4090")
    assert answer["status"] == "estimated", answer
    return answer


def test_nvidia_smi_describes_the_virtual_gpu(follow):
    source = """
assert smi("--query-gpu=index,name,memory.total,memory.used --format=csv,noheader,nounits") == \\
    "0, NVIDIA GeForce RTX 4090, 24564, 0\\n"
lines = smi("--query-gpu=memory.free,utilization.gpu,no.such.field --format=csv -i 0").splitlines()
assert lines[0] == "memory.free [MiB], utilization.gpu [%], no.such.field"
assert int(lines[1].split(" MiB")[0]) == torch.cuda.mem_get_info()[1] >> 20 and lines[1].endswith("0 %, [N/A]")
assert smi("-L") == f"GPU 0: {torch.cuda.get_device_name()} (UUID: GPU-{torch.cuda.get_device_properties(0).uuid})\\n"
assert smi("--query-compute-apps=pid,used_memory --format=csv,noheader") == ""
assert "24564MiB" in smi("")
train()
"""
    notes = run(follow, TRAIN + source)["estimate"]["notes"]
    assert any("the NVIDIA driver was read" in note for note in notes)


@pytest.mark.parametrize("words", ["os.system('nvidia-smi > /dev/null')", "subprocess.run(['nvidia-smi', '-L'])"])
def test_it_is_noted_that_the_driver_was_asked(follow, words):
    notes, others = (run(follow, TRAIN + asks + "train()")["estimate"]["notes"] for asks in (words + "\n", ""))
    assert any("the NVIDIA driver was read" in note for note in notes)
    assert not any("driver" in note for note in others)


def test_nvidia_smi_refuses_unknown_queries_by_its_exit_code(follow):
    source = "assert subprocess.run(['nvidia-smi', '--loop=1'], capture_output=True).returncode == 2\ntrain()"
    run(follow, TRAIN + source)


def test_a_script_that_takes_the_gpu_with_most_free_memory_runs(follow, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    source = """
free = [int(line) for line in smi("--query-gpu=memory.free --format=csv,nounits,noheader").splitlines()]
os.environ["CUDA_VISIBLE_DEVICES"] = str(free.index(max(free)))
train()
"""
    run(follow, TRAIN + source)


def test_nothing_of_it_stays(follow):
    before = os.environ["PATH"]
    answer = run(follow, TRAIN + "import shutil\nprint('found', shutil.which('nvidia-smi'))\ntrain()")
    folder = answer["printed"].partition("found ")[2].splitlines()[0].removesuffix("/nvidia-smi")
    assert os.environ["PATH"] == before
    assert folder.startswith("/") and not os.path.exists(folder)


def test_nvml_knows_the_memory_that_the_script_takes(follow):
    pytest.importorskip("pynvml")
    source = """
memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
rest = torch.cuda.mem_get_info()[1]
assert (memory.total, memory.free, memory.used) == (24564 << 20, rest, (24564 << 20) - rest)
newer = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
assert (newer.total, newer.free, newer.used) == (24564 << 20, rest, 0)
assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 0
assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle) == []
train()
free, total = torch.cuda.mem_get_info()
assert pynvml.nvmlDeviceGetMemoryInfo(handle).free == free
assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0
one, = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
assert (one.pid, one.usedGpuMemory) == (os.getpid(), total - free)
"""
    notes = run(follow, NVML + source)["estimate"]["notes"]
    assert sum("the NVIDIA driver was read" in note for note in notes) == 1


def test_nvml_names_the_card_and_refuses_what_it_has_not(follow):
    pytest.importorskip("pynvml")
    source = """
assert pynvml.nvmlDeviceGetCount() == 1
assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA GeForce RTX 4090"
assert pynvml.nvmlDeviceGetUUID(handle) == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == (8, 9)
assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) == 450_000
assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) > 0
assert pynvml.nvmlSystemGetCudaDriverVersion() >= 12000 and pynvml.nvmlSystemGetDriverVersion()
for wrong, name in ((lambda: pynvml.nvmlDeviceGetHandleByIndex(1), "NVMLError_InvalidArgument"),
                    (lambda: pynvml.nvmlDeviceGetFanSpeed(handle), "NVMLError_NotSupported")):
    try:
        wrong()
    except pynvml.NVMLError as error:
        assert type(error).__name__ == name
    else:
        raise AssertionError(name)
train()
pynvml.nvmlShutdown()
"""
    run(follow, NVML + source)
