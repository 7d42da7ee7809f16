"""Triton kernels are passed over: what PyTorch allocates around them is counted, and Triton's driver answers."""

import importlib.util

import pytest
import torch

from ullage.units import MIB
from ullage.virtual import virtual_gpu

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


@pytest.fixture
def kernels(gpu):
    from tests.virtual import triton_kernels

    return triton_kernels


def test_only_what_pytorch_allocates_is_counted(gpu, kernels):
    x = torch.ones(MIB, device="cuda")
    out = kernels.add(x, x)
    assert out.shape == x.shape
    assert gpu.peak_allocated == 8 * MIB


def test_the_kernels_are_named_in_one_note(gpu, kernels):
    x = torch.ones(8, 256, device="cuda")
    for _ in range(3):
        kernels.add(x, x)
        kernels.Softmax.apply(x, torch.ones(1, device="cuda"))
    (note,) = [note for note in gpu.notes if "did not run" in note]
    assert note.endswith(": add_kernel, softmax_kernel")


def test_a_grid_is_called_with_all_arguments(gpu, kernels):
    seen = {}
    x = torch.ones(8, device="cuda")
    kernels.add(x, x, grid=lambda meta: (seen.update(meta), (1,))[1])
    assert list(seen) == ["x_ptr", "y_ptr", "out_ptr", "n", "BLOCK"] and seen["BLOCK"] == 256
    with pytest.raises(KeyError, match="WIDTH"):
        kernels.add(x, x, grid=lambda meta: (meta["WIDTH"],))


def test_a_missing_argument_is_an_error(gpu, kernels):
    with pytest.raises(TypeError, match="out_ptr"):
        kernels.add_kernel[(1,)](1, 2)


def test_values_that_a_kernel_wrote_are_not_known(gpu, kernels):
    x = torch.tensor([1, 2, 3], device="cuda")
    assert x.tolist() == [1, 2, 3]
    kernels.add_kernel[(1,)](x, x, x, 3)
    x.tolist()
    assert any("values" in kind for kind, _ in gpu.noted)


def test_an_autotuner_uses_its_first_configuration_and_a_buffer(gpu, kernels):
    x = torch.ones(MIB // 256, 256, device="cuda", requires_grad=True)
    scale = torch.ones(1, device="cuda")
    kernels.Softmax.apply(x, scale).sum().backward()
    assert kernels.softmax_kernel.best_config.kwargs == {"COLUMNS": 256}
    assert 264 * MIB < gpu.peak_allocated < 265 * MIB
    torch.cuda.reset_peak_memory_stats()
    kernels.Softmax.apply(x, scale).sum().backward()
    assert torch.cuda.max_memory_allocated() < 30 * MIB
    assert any("softmax_kernel" in note and "256 MiB" in note for note in gpu.notes)


def test_the_next_gpu_tunes_again():
    for _ in range(2):
        with virtual_gpu("H200") as gpu:
            from tests.virtual import triton_kernels

            triton_kernels.Softmax.apply(torch.ones(8, 256, device="cuda"), torch.ones(1, device="cuda"))
            assert gpu.peak_allocated > 256 * MIB


def test_the_disk_cache_of_timings_is_neither_read_nor_written(gpu, kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels.softmax_kernel, "cache_results", True, raising=False)
    kernels.Softmax.apply(torch.ones(8, 256, device="cuda"), torch.ones(1, device="cuda"))
    assert gpu.peak_allocated > 256 * MIB
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(("name", "capability"), [("H200", 90), ("A100-40GB", 80), ("T4", 75)])
def test_the_driver_answers_as_the_named_gpu(name, capability):
    import triton

    with virtual_gpu(name):
        active = triton.runtime.driver.active
        target = active.get_current_target()
        assert (target.backend, target.arch, target.warp_size) == ("cuda", capability, 32)
        assert active.get_current_device() == 0
        properties = active.utils.get_device_properties(0)
        assert properties["multiprocessor_count"] == torch.cuda.get_device_properties(0).multi_processor_count
        from torch.utils._triton import has_triton

        assert has_triton()


def test_without_a_virtual_gpu_there_is_no_driver():
    import triton

    with virtual_gpu("H200"):
        assert triton.runtime.driver.active
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="active driver"):
            triton.runtime.driver.active.get_current_target()


def test_a_warmed_up_kernel_can_be_asked_and_launched(gpu, kernels):
    x = torch.ones(8, device="cuda")
    kernel = kernels.add_kernel.warmup(x, x, x, 8, BLOCK=256, num_warps=8, grid=(1,))
    kernel._init_handles()
    assert not any("did not run" in note for note in gpu.notes)
    assert kernel.metadata.num_warps == 8 and kernel.n_regs > 0 and kernel.metadata.shared >= 0
    kernel[(1, 1, 1)](x, x, x, 8)
    assert any("add_kernel" in note for note in gpu.notes)


def test_timing_by_hand_takes_its_buffer_and_gives_it_back(gpu, kernels):
    from triton.testing import do_bench

    x = torch.ones(8, device="cuda")
    assert do_bench(lambda: kernels.add(x, x)) > 0
    assert len(do_bench(lambda: kernels.add(x, x), quantiles=[0.5, 0.2, 0.8])) == 3
    assert gpu.peak_allocated >= 256 * MIB
    assert torch.cuda.memory_allocated() < MIB


def test_timing_by_a_graph_takes_no_buffer(gpu, kernels):
    from triton.testing import do_bench_cudagraph

    x = torch.ones(MIB, device="cuda")
    assert do_bench_cudagraph(lambda: kernels.add(x, x)) > 0
    assert 8 * MIB <= gpu.peak_allocated < 9 * MIB
    assert [entry["what"] for entry in gpu.left_out] == ["CUDA graphs by which Triton times kernels"]


@pytest.mark.parametrize(("name", "taken"), [("H200", 128 * 1000), ("A100-40GB", 0)])
def test_descriptors_take_memory_from_the_function_that_was_set(name, taken):
    import triton

    with virtual_gpu(name):
        from tests.virtual import triton_kernels

        if not hasattr(triton, "set_allocator"):
            pytest.skip("this Triton has no descriptors")
        asked = []
        triton_kernels.described_kernel[(1000,)](torch.ones(1000, 64, device="cuda"), 1000, BLOCK=64)

        def allocate(size, alignment, stream):
            asked.append(size)
            return torch.empty(size, device="cuda", dtype=torch.int8)

        triton.set_allocator(allocate)
        triton_kernels.described_kernel[(1000,)](torch.ones(1000, 64, device="cuda"), 1000, BLOCK=64)
        assert sum(asked) == taken


def test_operators_made_of_kernels_are_run(gpu, kernels):
    import triton

    @torch.library.triton_op("ullage_tests::add", mutates_args={})
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.empty(3 * x.numel(), device=x.device)
        torch.library.wrap_triton(kernels.add_kernel)[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256)
        return out

    x = torch.ones(MIB, device="cuda")
    assert add(x, x).shape == x.shape
    assert gpu.peak_allocated == 20 * MIB
    assert [note for note in gpu.notes if "add_kernel" in note]
