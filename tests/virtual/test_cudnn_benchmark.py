"""`torch.backends.cudnn.benchmark`: plans are tried in free memory, the cache is emptied, and the fastest is kept."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ullage
import ullage.virtual
from ullage.allocator import CachingAllocator
from ullage.estimation.over_gpus import estimate_over_gpus
from ullage.hardware import gpu as find_gpu
from ullage.virtual.cudnn import workspaces
from ullage.virtual.cudnn.formulas import (
    PHASES,
    WINOGRAD,
    ConvolutionProblem,
    Trial,
    Workspace,
    terms,
    transform_bytes,
    transforms,
)
from ullage.virtual.cudnn.workspaces import trial, workspace
from ullage.virtual.memory.tensors import DeviceMemory

MIB = 1 << 20
LAYER = ConvolutionProblem("f", (8, 64, 8, 8), (64, 64, 3, 3), (8, 64, 8, 8), (1, 1), (1, 1), (1, 1), 1, "f32", False)


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True):
        yield


def convolve(layer: nn.Module, *size: int) -> None:
    layer(torch.zeros(*size, device="cuda", requires_grad=True)).sum().backward()


def trials(gpu: ullage.virtual.VirtualGPU) -> list[int]:
    requests = gpu.memory.requests
    return [size for place in requests.tried_at for size in requests.sizes(place, place + 1)]


def test_each_problem_is_tried_once() -> None:
    torch.backends.cudnn.benchmark = True
    with ullage.virtual_gpu("H200") as gpu:
        layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
        convolve(layer, 8, 64, 56, 56)
        first = len(trials(gpu))
        convolve(layer, 8, 64, 56, 56)
        assert first == len(trials(gpu)) == 3  # forward, the gradients of the input and of the filter
        convolve(layer, 9, 64, 56, 56)
    assert len(trials(gpu)) == 6
    assert any("cudnn.benchmark is on" in note for note in gpu.notes)


@pytest.mark.parametrize("how", ["switch", "flags", "core"])
def test_every_way_to_switch_it_on_is_seen(how: str) -> None:
    with ullage.virtual_gpu("H200") as gpu:
        if how == "switch":
            torch.backends.cudnn.benchmark = True
        elif how == "core":
            torch._C._set_cudnn_benchmark(True)
        with torch.backends.cudnn.flags(enabled=True, benchmark=how == "flags" or torch.backends.cudnn.benchmark):
            convolve(nn.Conv2d(64, 64, 3).cuda(), 8, 64, 56, 56)
    assert trials(gpu)


def test_a_convolution_that_does_not_run_in_cudnn_is_not_tried() -> None:
    torch.backends.cudnn.benchmark = True
    with ullage.virtual_gpu("H200") as gpu:
        convolve(nn.Conv2d(64, 64, 3, groups=64).cuda(), 8, 64, 56, 56)
    assert not trials(gpu)


def test_a_thread_has_plans_of_its_own() -> None:
    trial = Trial((64 * MIB,), 64 * MIB, Workspace(MIB, MIB))
    with ullage.virtual_gpu("H200") as gpu:
        for _ in range(2):
            gpu.libraries.convolve(LAYER, trial)
        other = threading.Thread(target=gpu.libraries.convolve, args=(LAYER, trial))
        other.start()
        other.join(60)
    assert trials(gpu) == [64 * MIB, 64 * MIB]
    assert gpu.memory.requests.sizes().count(MIB) == 3


def test_the_cache_is_empty_after_a_trial() -> None:
    with ullage.virtual_gpu("H200") as gpu:
        del_me = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
        del del_me
        gpu.libraries.convolve(LAYER, Trial((64 * MIB,), 64 * MIB, Workspace(0, 0)))
        assert torch.cuda.memory_reserved() == 0
        assert torch.cuda.max_memory_reserved() == 200 * MIB


def test_tried_plans_count_in_pytorchs_peaks_not_in_the_need() -> None:
    with ullage.virtual_gpu("H200") as gpu:
        kept = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        gpu.libraries.convolve(LAYER, Trial((640 * MIB, MIB), 700 * MIB, Workspace(30 * MIB, 30 * MIB)))
        assert torch.cuda.max_memory_reserved() == torch.cuda.max_memory_allocated() == 740 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_reserved() == 130 * MIB
        del kept
    assert gpu.peak_reserved == 740 * MIB
    assert gpu.needed_reserved == 130 * MIB
    assert gpu.upper - gpu.needed_upper >= 670 * MIB


def test_less_is_tried_where_less_is_free() -> None:
    sizes = (100 << 30, 10 << 30, MIB)
    with ullage.virtual_gpu("T4") as gpu:
        gpu.libraries.convolve(LAYER, Trial(sizes, sizes[0], Workspace(MIB, MIB)))
        assert trials(gpu) == [10 << 30]
        torch.cuda.set_per_process_memory_fraction(0.3)
        gpu.libraries.convolve(LAYER._replace(groups=2), Trial(sizes, sizes[0], Workspace(MIB, MIB)))
    assert trials(gpu)[1:] == [10 << 30 >> 2]  # PyTorch halves what it is refused
    assert gpu.upper <= gpu.spec.usable


def test_a_plan_without_room_gives_way_to_a_smaller_one() -> None:
    trial = Trial((3 << 30, 2 << 30, MIB), 3 << 30, Workspace(2 << 30, 2 << 30))
    with ullage.virtual_gpu("T4") as gpu:
        everything = torch.empty(gpu.free_on_card() - (1 << 30), dtype=torch.uint8, device="cuda")
        gpu.libraries.convolve(LAYER, trial)
        assert gpu.memory.requests.sizes(-2) == [MIB]
        assert gpu.memory.out_of_memory is None
        del everything


def test_the_bound_takes_a_trial_as_large_as_it_may_be() -> None:
    memory = DeviceMemory(CachingAllocator(1 << 34))
    memory.give_back(memory.take(3 * MIB))
    memory.try_out([40 * MIB], room=1 << 34, larger=300 * MIB)
    assert (
        memory.requests.largest_reserved(memory.allocator.config, tried=True) == 320 * MIB
    )  # the cache is emptied afterwards
    requests, config = memory.requests, memory.allocator.config
    assert requests.largest_reserved(config, tried=True) == 320 * MIB  # the cache is emptied afterwards
    assert requests.largest_reserved(config) == 20 * MIB


# What cuDNN 9.19 says on an H200 of its plans by Fourier transforms.
TRANSFORMS = [
    ("f", (16, 540, 28, 28), (216, 540, 1, 1), (16, 216, 28, 28), 1, 0, 1, "f32", False, 1090903680),
    ("f", (100, 64, 128, 128), (64, 64, 3, 3), (100, 64, 128, 128), 1, 1, 1, "f32", False, 5546065920),
    ("f", (48, 128, 14, 14), (128, 128, 3, 3), (48, 128, 14, 14), 1, 1, 1, "f32", True, 62717968),
    ("f", (4, 1024, 56, 56), (1024, 32, 3, 3), (4, 1024, 56, 56), 1, 1, 32, "f32", False, 337412224),
    ("d", (8, 48, 64, 64), (96, 48, 3, 3), (8, 96, 64, 64), 1, 1, 1, "f32", False, 30081024),
    ("d", (16, 128, 64, 64), (256, 128, 4, 4), (16, 256, 32, 32), 2, 1, 1, "f32", False, 732430352),
    ("w", (128, 256, 64, 64), (64, 256, 1, 1), (128, 64, 64, 64), 1, 0, 1, "f32", False, 1518338048),
    ("w", (9, 1024, 16, 16), (2048, 1024, 1, 1), (9, 2048, 16, 16), 1, 0, 1, "f32", False, 4850712576),
]


@pytest.mark.parametrize("row", TRANSFORMS, ids=lambda row: f"{row[0]}-{row[-1]}")
def test_plans_by_fourier_transforms_have_a_formula(row: tuple[Any, ...]) -> None:
    direction, source, weight, out, stride, padding, groups, kind, last, size = row
    pairs = (stride, stride), (padding, padding), (1, 1)
    assert transform_bytes(ConvolutionProblem(direction, source, weight, out, *pairs, groups, kind, last)) == size


# And of other plans: by Winograd's transforms, of strided gradients, and in tiles of results.
METHODS = [
    (WINOGRAD, "w", (26, 64, 71, 71), (64, 64, 3, 3), (26, 64, 71, 71), 1, 1, 1, "f32", 155860992),
    (WINOGRAD, "w", (256, 48, 96, 96), (96, 48, 3, 3), (256, 96, 96, 96), 1, 1, 1, "f32", 3058311168),
    (WINOGRAD, "f", (24, 24, 112, 112), (32, 24, 3, 3), (24, 32, 112, 112), 1, 1, 1, "bf16", 202420224),
    (WINOGRAD, "f", (256, 24, 48, 48), (8, 24, 5, 5), (256, 8, 48, 48), 1, 2, 1, "bf16", 199490304),
    (WINOGRAD, "d", (2, 192, 75, 75), (192, 6, 3, 3), (2, 192, 75, 75), 1, 1, 32, "bf16", 79888896),
    (PHASES, "d", (16, 1024, 8, 8), (2048, 1024, 4, 4), (16, 2048, 4, 4), 2, 1, 1, "f32", 308281360),
    (PHASES, "d", (32, 1024, 8, 8), (2048, 1024, 4, 4), (32, 2048, 4, 4), 2, 1, 1, "f32", 314572816),
]


@pytest.mark.parametrize("row", METHODS, ids=lambda row: f"{row[1]}-{row[-1]}")
def test_plans_by_other_methods_have_a_formula(row: tuple[Any, ...]) -> None:
    buffer, direction, source, weight, out, stride, padding, groups, kind, size = row
    pairs = (stride, stride), (padding, padding), (1, 1)
    found = terms(ConvolutionProblem(direction, source, weight, out, *pairs, groups, kind, False))
    assert size - 16 <= found.buffers[buffer] <= size


def test_dilated_filters_are_not_transformed() -> None:
    layer = ConvolutionProblem(*TRANSFORMS[1][:4], (1, 1), (2, 2), (2, 2), 1, "f32", False)
    assert transforms(layer._replace(dilation=(1, 1)))
    assert not transforms(layer)


def test_the_largest_plan_is_looked_up_or_guessed() -> None:
    layer = ConvolutionProblem(*TRANSFORMS[1][:4], (1, 1), (1, 1), (1, 1), 1, "f32", False)
    found = trial(layer, (9, 0), 132, True, False)
    assert found.sizes[0] == TRANSFORMS[1][-1]
    assert list(found.sizes) == sorted(found.sizes, reverse=True)
    assert trial(layer, (8, 0), 108, True, False).guessed
    assert trial(layer._replace(kind="f64"), (9, 0), 132, True, False).sizes == ()


class Big(nn.Module):
    """Its plans want more than its tensors take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(batch: int = 16) -> None:
    torch.backends.cudnn.benchmark = True
    model = Big().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.zeros(batch, 3, 128, 128, device="cuda")).mean().backward()
        optimizer.step()


def test_the_estimate_tells_what_is_needed() -> None:
    answer = ullage.estimate(train, gpu="H200")
    needed = answer.without_trials
    assert needed is not None
    assert needed["process_memory"] == answer.needed <= (answer.process_memory or 0)
    assert needed["upper"] == answer.bound <= (answer.upper or 0)
    assert answer.headroom == answer.gpu_memory - answer.needed
    assert "cudnn.benchmark" in str(answer)
    assert ullage.Estimate.from_dict(answer.to_dict()).without_trials == needed


def test_a_job_fits_where_its_trials_do_not() -> None:
    answers = estimate_over_gpus(
        lambda card: ullage.estimate(train, gpu=card), [find_gpu("A100-40GB"), find_gpu("A100-80GB")]
    )
    assert [answer.fits for answer in answers] == [True, True]
    assert [answer.computed_on for answer in answers] == [None, None]  # what is tried depends on the card's memory


def test_no_notes_if_it_is_off() -> None:
    def plain() -> None:
        nn.Conv2d(3, 8, 3).cuda()(torch.zeros(1, 3, 8, 8, device="cuda")).sum().backward()

    assert ullage.estimate(plain, gpu="H200").without_trials is None


@pytest.mark.parametrize(("filter_side", "kept"), [(3, "another"), (9, "it")])
def test_a_first_fourier_plan_is_kept_only_for_large_filters(
    monkeypatch: pytest.MonkeyPatch, filter_side: int, kept: str
) -> None:
    side, padding = filter_side, filter_side // 2
    sizes = (96, 16, 32, 32), (16, 16, side, side), (96, 16, 32, 32)
    layer = ConvolutionProblem("f", *sizes, (1, 1), (padding, padding), (1, 1), 1, "f16", False)
    large, small = transform_bytes(layer) + 512 * side * side, 4096  # with a copy of the filters
    monkeypatch.setattr(workspaces, "measured", lambda *_: None)
    monkeypatch.setattr(workspaces, "sizes_by_plans", lambda *_: [(large, 0.9), (small, 0.1)])
    for function in (workspace, trial):
        function.cache_clear()
    found = trial(layer, (9, 0), 132, True, False)
    assert large in found.sizes and workspace(layer, (9, 0), 132).size == large
    assert found.winner.size == (small if kept == "another" else large)
    for function in (workspace, trial):
        function.cache_clear()
