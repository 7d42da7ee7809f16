"""torch.cuda and torch.accelerator answer as they would with the card."""

import pytest
import torch

from ullage.errors import UnsupportedOperation
from ullage.hardware import gpu as find_gpu
from ullage.virtual import virtual_gpu

MIB = 1024**2


@pytest.fixture
def gpu():
    with virtual_gpu("A100-40GB") as gpu:
        yield gpu


def test_the_device_is_there(gpu):
    assert torch.cuda.is_available() and torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    torch.cuda.init()
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    assert torch.version.cuda is not None


def test_its_properties_are_the_catalogues(gpu):
    spec = find_gpu("A100-40GB")
    properties = torch.cuda.get_device_properties(0)
    assert torch.cuda.get_device_name() == properties.name == spec.device_name
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor) == (8, 0)
    assert properties.total_memory == spec.usable
    assert properties.multi_processor_count == spec.sms
    assert properties.warp_size == 32
    assert properties.shared_memory_per_block_optin == 163 * 1024
    assert repr(properties).startswith(f"_CudaDeviceProperties(name='{spec.device_name}', major=8, minor=0, ")
    assert "sm_80" in torch.cuda.get_arch_list()


def test_features_depend_on_the_cards_generation():
    def supported():
        found = [torch.cuda.is_bf16_supported(including_emulation=False)]
        if hasattr(torch.cuda, "is_tf32_supported"):  # since 2.7
            found.append(torch.cuda.is_tf32_supported())
        return found

    with virtual_gpu("T4"):
        assert not any(supported())
    with virtual_gpu("H200"):
        assert all(supported())


def test_another_device_is_refused_in_pytorchs_words(gpu):
    torch.cuda.set_device(0)
    torch.cuda.set_device("cuda:0")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"), torch.cuda.device(1):
        pass
    with torch.cuda.device(0), torch.cuda.device(torch.device("cuda")), torch.cuda.device_of(torch.ones(1)):
        assert torch.cuda.current_device() == 0


def test_memory_functions_are_the_allocators(gpu):
    x = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 3 * MIB
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved() == 20 * MIB
    free, total = torch.cuda.mem_get_info()
    assert total == gpu.memory.total
    assert total - free == gpu.context + 20 * MIB == torch.cuda.device_memory_used()
    assert torch.cuda.memory_stats()["allocated_bytes.large_pool.current"] == 3 * MIB
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
    assert torch.cuda.memory_snapshot()[0]["blocks"][0]["state"] == "active_allocated"
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_reset_of_the_peaks_hides_nothing_from_the_virtual_gpu(gpu):
    x = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    assert gpu.peak_allocated == 3 * MIB


def test_the_memory_fraction_limits_what_can_be_had(gpu):
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert torch.cuda.get_per_process_memory_fraction() == 0.25
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(20 * 1024 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.empty(20 * 1024 * MIB, dtype=torch.uint8, device="cuda")


def test_a_memory_history_is_recorded(gpu, tmp_path):
    torch.cuda.memory._record_memory_history()
    x = torch.zeros(1000, device="cuda")
    address = x.data_ptr()
    del x
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    actions = [
        entry["action"]
        for entry in torch.cuda.memory._snapshot()["device_traces"][0]
        if entry["addr"] == address and not entry["action"].startswith("segment")
    ]
    assert actions == ["alloc", "free_requested", "free_completed"]
    torch.cuda.memory._record_memory_history(enabled=None)
    assert gpu.memory.allocator.on_event is None


def test_sensors_answer_and_it_is_noted(gpu):
    assert 0 <= torch.cuda.utilization() <= 100
    assert torch.cuda.temperature() > 0
    assert any("torch.cuda.utilization()" in note for note in gpu.notes)


def test_library_handles_are_refused(gpu):
    with pytest.raises(UnsupportedOperation, match="cuBLAS handle"):
        torch.cuda.current_blas_handle()


def test_the_accelerator_is_the_same_device(gpu):
    x = torch.zeros(1000, device="cuda")
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream().stream_id == 0
    if hasattr(torch.accelerator, "memory_allocated"):  # since 2.9
        assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() == 4096
        assert torch.accelerator.max_memory_reserved() == torch.cuda.max_memory_reserved()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.accelerator.set_device_index(1)
    del x


def test_nvtx_and_the_profilers_switch_do_nothing(gpu):
    with torch.cuda.nvtx.range("step"):
        assert torch.cuda.nvtx.mark("here") is None
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    assert gpu.memory.allocator.reserved == 0 and not gpu.notes


def test_the_backends_are_there_and_their_switches_work(gpu):
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    assert cuda.is_built() and cudnn.is_available()
    assert cudnn.version() == 91900
    assert cudnn.is_acceptable(torch.ones(1, device="cuda"))
    with cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
        assert cudnn.benchmark
    assert not cudnn.benchmark
    cuda.matmul.allow_tf32 = True
    assert cuda.matmul.allow_tf32
    cuda.matmul.allow_tf32 = False
    cuda.cufft_plan_cache.max_size = 10
    cuda.cufft_plan_cache.clear()
    assert cuda.cufft_plan_cache[0].max_size == 10
    cuda.preferred_linalg_library("magma")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not cuda.flash_sdp_enabled()
    assert cuda.flash_sdp_enabled()
