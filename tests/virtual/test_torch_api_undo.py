"""Leaving the `with` statement puts everything back: after success, after an exception, and nested."""

import threading
from types import ModuleType

import pytest
import torch

from ullage.virtual import virtual_gpu
from ullage.virtual.call.plan import kernel_switches, tf32_for_products
from ullage.virtual.call.replacements import Replacements

PLACES = [
    torch._C,
    torch.cuda,
    torch.cuda.streams,
    torch.cuda.graphs,
    torch.cuda.memory,
    torch.cuda.nvtx,
    torch.backends.cudnn.m,
    torch.version,
    torch.distributed,
    torch.Tensor,
    torch.UntypedStorage,
    torch._utils,
    torch._tensor_str,
    torch.nn.parallel._functions,
    threading.Thread,
]
NAMES_IN_TORCH = ("tensor", "as_tensor", "asarray", "compile", "Generator", "Stream", "Event")


def state():
    names = {
        (place.__name__, name): value
        for place in PLACES
        for name, value in vars(place).items()
        if not isinstance(value, ModuleType)  # modules that PyTorch imports late
    }
    names |= {("torch", name): getattr(torch, name) for name in NAMES_IN_TORCH}
    names["locations"] = list(torch.serialization._package_registry)
    names["plans"] = list(torch.backends.cuda.cufft_plan_cache.caches)
    names["default device"] = torch.empty(0).device
    return names


@pytest.fixture(autouse=True)
def used_before():
    with virtual_gpu("H200"):
        torch.ones(1, device="cuda").sum()


def test_everything_is_as_before():
    before = state()
    with virtual_gpu("H200"):
        torch.set_default_device("cuda")
        torch.nn.DataParallel(torch.nn.Linear(2, 2))(torch.ones(2, 2))
        assert state() != before
    assert state() == before


def test_everything_is_as_before_after_an_exception():
    before = state()
    with pytest.raises(ZeroDivisionError), virtual_gpu("H200"):
        1 / 0  # noqa: B018
    assert state() == before


def test_everything_is_as_before_after_two_nested_ones():
    before = state()
    with virtual_gpu("H200"):
        outer = state()
        with virtual_gpu("A100-40GB"):
            assert torch.cuda.get_device_name() == "NVIDIA A100-SXM4-40GB"
        assert torch.cuda.get_device_name() == "NVIDIA H200"
        assert state() == outer
    assert state() == before


def test_a_nested_one_trains_and_counts_for_itself():
    with virtual_gpu("H200") as outer:
        layer = torch.nn.BatchNorm2d(3).cuda()
        with virtual_gpu("A100-40GB") as inner:
            torch.nn.BatchNorm2d(3).cuda()(torch.randn(2, 3, 64, 64, device="cuda")).sum().backward()
            assert torch.cuda.memory_allocated() == inner.memory.allocator.allocated
        assert inner.peak_allocated > outer.peak_allocated > 0
        layer(torch.randn(2, 3, 64, 64, device="cuda")).sum().backward()
        assert layer.weight.grad.is_cuda


def test_cuda_is_gone_afterwards_as_if_it_had_never_been_there():
    if torch.cuda.is_available():
        pytest.skip("a real GPU is here")
    with virtual_gpu("H200"):
        torch.zeros(1, device="cuda")
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    with pytest.raises((AssertionError, RuntimeError), match="not compiled with CUDA|no NVIDIA driver"):
        torch.zeros(1, device="cuda")


def test_an_attribute_that_was_not_there_is_removed_again():
    class Place:
        pass

    replacements = Replacements()
    replacements.put(Place, "new", 1)
    replacements.undo()
    assert not hasattr(Place, "new")


def test_a_module_is_patched_on_import_and_not_after_the_undo(tmp_path, monkeypatch):
    for name in ("surface_early", "surface_late"):
        (tmp_path / f"{name}.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    replacements = Replacements()
    for name in ("surface_early", "surface_late"):
        replacements.when_imported(name, lambda module: replacements.put(module, "value", 2))
    import surface_early

    assert surface_early.value == 2
    replacements.undo()
    import surface_late

    assert (surface_early.value, surface_late.value) == (1, 1)
    assert type(surface_late.__loader__).__name__ == "SourceFileLoader"


SWITCHES = {
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "cudnn.allow_tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "matmul.allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "default_dtype": lambda: torch.set_default_dtype(torch.bfloat16),
    "flash_sdp": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "grad_enabled": lambda: torch.set_grad_enabled(False),
    "autocast_enabled": lambda: torch.set_autocast_enabled("cuda", True),
    "autocast_dtype": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
}


def switches():
    return (
        kernel_switches(),
        tf32_for_products(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )


@pytest.mark.parametrize("switch", SWITCHES)
def test_settings_end_with_their_program(switch):
    """The next program in this process finds what this one has found, as in a process of its own."""
    before = switches()
    with virtual_gpu("H200"):
        SWITCHES[switch]()
        assert switches() != before
    assert switches() == before
