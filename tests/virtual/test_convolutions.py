"""What convolutions ask of the allocator: PyTorch's order and copies, cuDNN's workspaces."""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from tests.virtual import recording
from tests.virtual.test_kernels_recorded import play

import ullage
from ullage.virtual.cudnn import formulas, workspaces
from ullage.virtual.cudnn.formulas import ConvolutionProblem, lengths
from ullage.virtual.cudnn.network import PlanNetwork, network_inputs
from ullage.virtual.cudnn.plans import fallback
from ullage.virtual.cudnn.workspaces import workspace
from ullage.virtual.upper_bound import SURPRISES, Uncertainty

HELD_OUT = Path(__file__).parent / "data" / "held_out_convolutions_h200.jsonl.gz"
FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize(
    ("part", "direction", "source", "weight", "out", "settings", "kind", "expected"),
    [
        ("needed_copies", "f", "2,8,5,5", "16,8,1,1", "2,16,5,5", (1, 0, 1), "f16", 2400),
        ("winograd_bytes", "w", "26,64,71,71", "64,64,3,3", "26,64,71,71", (1, 1, 1), "f32", 155860992),
        ("phase_bytes", "d", "16,1024,8,8", "2048,1024,4,4", "16,2048,4,4", (2, 1, 1), "f32", 308281344),
        ("padded_phase_bytes", "d", "32,9,160,64", "27,9,21,21", "32,27,80,32", (2, 10, 1), "f32", 24212496),
        ("padded_phase_bytes", "d", "256,70,49,49", "70,70,2,2", "256,70,24,24", (2, 0, 1), "f32", 207698704),
        ("sample_bytes", "w", "8,787,32,32", "787,1,1,1", "8,787,32,32", (1, 0, 787), "bf16", 204800),
        ("transform_bytes", "f", "64,1344,14,14", "2520,1344,1,1", "64,2520,14,14", (1, 0, 1), "f32", 8015099904),
        ("transforms", "f", "1,3,8,8", "16,3,3,3", "1,16,8,8", (1, 1, 1), "bf16", False),
    ],
)
def test_parts_of_a_workspace(part, direction, source, weight, out, settings, kind, expected):
    sizes = [tuple(map(int, size.split(","))) for size in (source, weight, out)]
    stride, padding, groups = settings
    pairs = (stride,) * 2, (padding,) * 2, (1, 1)
    assert getattr(formulas, part)(ConvolutionProblem(direction, *sizes, *pairs, groups, kind, False)) == expected


@pytest.fixture
def without_table(monkeypatch):
    monkeypatch.setattr(workspaces, "use_table", False)
    monkeypatch.setattr("ullage.virtual.call.dispatch._plans", {})
    workspace.cache_clear()
    yield
    workspace.cache_clear()


@pytest.fixture
def look_ups(monkeypatch):
    """What the table answers to each question; `None` where it has no answer."""
    answers, measured = [], workspaces.measured
    monkeypatch.setattr(workspaces, "measured", lambda *asked: answers.append(measured(*asked)) or answers[-1])
    monkeypatch.setattr("ullage.virtual.call.dispatch._plans", {})
    workspace.cache_clear()
    yield answers
    workspace.cache_clear()


def tensor(size, kind="f32", layout="c"):
    made = torch.empty(size, dtype=TYPES[kind], device="cuda")
    if layout == "c":
        return made
    return made.contiguous(memory_format=torch.channels_last if len(size) == 4 else torch.channels_last_3d)


def requests(gpu, operator, *arguments):
    """Sizes asked for during one call, and its outputs."""
    with torch.no_grad():
        return recording.requests(gpu, lambda: operator(*arguments))


def backward(gpu, grad, source, weight, mask=(True, True, False), kind="f32", layout="c", groups=1, **settings):
    """Requests of a backward call; settings are by dimension."""
    dims = len(source) - 2
    values = [settings.get(name, [start] * dims) for name, start in (("stride", 1), ("padding", 0), ("dilation", 1))]
    tensors = [tensor(size, kind, layout) for size in (grad, source, weight)]
    bias = [grad[1]] if mask[2] else None
    rest = (settings.get("transposed", False), [0] * dims, groups, list(mask))
    return requests(gpu, BACKWARD, *tensors, bias, *values, *rest)


def test_measured_forward_call_with_copies_and_partial_results():
    with ullage.virtual_gpu("H200") as gpu:
        arguments = (None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)
        sizes, _ = requests(gpu, FORWARD, tensor((32, 128, 64, 64)), tensor((128, 128, 3, 3)), *arguments)
    assert sizes == [16777216, 88670579]


MEASURED = [
    (
        dict(grad=(8, 224, 7, 7), source=(8, 768, 7, 7), weight=(224, 768, 3, 3), kind="bf16", padding=[1, 1]),
        [602112, 3874320, 3096576, 3874320],
    ),
    (
        dict(grad=(96, 128, 36, 36), source=(96, 1824, 36, 36), weight=(128, 1824, 1, 1), layout="cl"),
        [907739136, 131, 933888, 32686336],
    ),
    (
        dict(grad=(8, 216, 20, 20), source=(8, 8, 20, 20), weight=(8, 216, 1, 1), kind="f16", transposed=True),
        [51200, 3456, 1558160],
    ),
    (dict(grad=(32, 1, 1024), source=(32, 1, 1024), weight=(1, 1, 5), kind="f16", padding=[2]), [65536, 10, 1545895]),
    (
        dict(grad=(2, 256, 32, 32), source=(2, 256, 32, 32), weight=(256, 256, 3, 3), padding=[1, 1], mask=(True,) * 3),
        [2097152, 6553616, 2359296, 18874368, 1024],
    ),
    (
        dict(
            grad=(128, 384, 1, 4, 4),
            source=(128, 192, 1, 4, 4),
            weight=(384, 192, 1, 3, 3),
            layout="cl",
            padding=[0, 1, 1],
        ),
        [1572864, 2654208, 7078263],
    ),
]


@pytest.mark.parametrize(("call", "expected"), MEASURED)
def test_requests_and_order_match_pytorch_for_tabled_workspaces(call, expected):
    """Whether the choice of a workspace is right is not shown here: each is looked up."""
    with ullage.virtual_gpu("H200") as gpu:
        assert backward(gpu, **call)[0] == expected
    assert gpu.uncertainty.surprise == 0


@pytest.mark.parametrize(("call", "expected"), MEASURED)
def test_hard_calls_are_guessed_and_in_doubt(without_table, call, expected):
    """Calls that were chosen for their unusual workspaces: without the table all are exact."""
    with ullage.virtual_gpu("H200") as gpu:
        sizes, outputs = backward(gpu, **call)
    assert sizes == expected
    assert {output.nbytes for output in outputs if output is not None} <= set(sizes)
    assert gpu.uncertainty.surprise > 0 and gpu.upper > gpu.process_memory


@pytest.mark.parametrize("kind", [numpy.int8, numpy.int16])
def test_a_network_can_say_that_cudnn_names_no_plan(kind):
    """Then PyTorch's first fallback is taken. Weights are whole numbers of 8 or 16 bits."""
    layer = ConvolutionProblem("f", (1, 3, 8, 8), (16, 3, 3, 3), (1, 16, 8, 8), (1, 1), (1, 1), (1, 1), 1, "f16", False)
    inputs = len(network_inputs(lengths(layer), "f"))
    values = {"mean": numpy.zeros(inputs), "std": numpy.ones(inputs), "layers": numpy.array(0)}
    values |= {"first": numpy.full((2, inputs), 100, kind), "first_scale": numpy.full(2, 0.01)}
    values |= {"first_bias": numpy.zeros(2), "head": numpy.eye(2, dtype=kind), "head_scale": numpy.ones(2)}
    values |= {"head_bias": numpy.array([0.0, 9.0]), "plans": numpy.frombuffer(b"[[28, [[2, 1]]], [-1, []]]", "u1")}
    [(likeliest, share), *_] = PlanNetwork(values, numpy, "f").plans(layer, 0.0)
    assert likeliest == fallback("f") and share > 0.9


def outside_the_table(lines, look_ups):
    """Of the calls that the table does not have, by operator: how many, and how many are exact, or off by 1 MiB; last
    how many take more than a bound allows for."""
    calls, exact, close, beyond = Counter(), Counter(), Counter(), Counter()
    with ullage.virtual_gpu("H200") as gpu, torch.no_grad():
        gpu.libraries.need = lambda library: None
        for (operator, arguments, keywords), real, _, _ in map(json.loads, lines):
            look_ups.clear()
            gpu.uncertainty = Uncertainty()
            sizes = [size for size in play(gpu, operator, arguments, keywords)[0] if size >= 0]
            if None in look_ups:
                calls[operator] += 1
                exact[operator] += sizes == real
                close[operator] += abs(sum(sizes) - sum(real)) <= 2**20
                beyond[operator] += sum(real) - sum(sizes) > allowance(gpu.uncertainty)
    return {name: (calls[name], exact[name] / calls[name], close[name] / calls[name], beyond[name]) for name in calls}


def allowance(uncertainty):
    """What a bound adds for the guesses of one call: a small segment at least."""
    larger = sum(guess.larger - guess.size for guess in uncertainty.guesses())
    return larger + max(SURPRISES * uncertainty.surprise, 2 * 2**20)


def test_random_layers_that_nothing_was_fitted_on(look_ups):
    """Drawn at random, measured on an H200, and used for nothing else."""
    with gzip.open(HELD_OUT, "rt") as file:
        found = outside_the_table(file, look_ups)
    count, exact, close, beyond = found["aten.convolution.default"]  # 362 and 386 of 396
    assert count > 390 and exact >= 0.88 and close >= 0.95
    count, exact, close, more = found["aten.convolution_backward.default"]  # 317 and 370 of 396
    assert count > 390 and exact >= 0.77 and close >= 0.90
    assert beyond + more <= 2  # of 792


def test_recorded_calls_outside_the_table(reference, look_ups):
    """Every tenth convolution of models that are known."""
    with gzip.open(reference("groundtruth/kernels_h200.jsonl.gz"), "rt") as file:
        lines = [line for line in file if line.startswith('[["aten.convolution')]
    found = outside_the_table(lines[::10], look_ups)
    count, exact, close, _ = found["aten.convolution.default"]
    assert count > 200 and exact >= 0.90 and close >= 0.95
    count, exact, close, _ = found["aten.convolution_backward.default"]
    assert count > 200 and exact >= 0.70 and close >= 0.85


def test_depthwise_gradients_use_pytorchs_kernel_filter_first():
    call = dict(grad=(2, 144, 32, 32), source=(2, 144, 64, 64), weight=(144, 1, 5, 5), stride=[2, 2], padding=[2, 2])
    with ullage.virtual_gpu("H200") as gpu:
        assert backward(gpu, **call, groups=144)[0] == [14400, 4718592]


def test_channels_last_is_kept_by_output_and_gradients():
    with ullage.virtual_gpu("H200"):
        layer = torch.nn.Conv2d(8, 16, 3, device="cuda").to(memory_format=torch.channels_last)
        x = torch.zeros(2, 8, 10, 10, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
        y = layer(x)
        y.sum().backward()
        for made in (y, x.grad, layer.weight.grad):
            assert made.is_contiguous(memory_format=torch.channels_last)
        assert layer.bias.grad.shape == (16,)


def test_contiguous_filter_is_copied_for_a_channels_last_input():
    with ullage.virtual_gpu("H200") as gpu:
        arguments = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        source, weight = tensor((4, 64, 16, 16), "f16", "cl"), tensor((64, 64, 3, 3), "f16")
        sizes, out = requests(gpu, FORWARD, source, weight, *arguments)
    assert sizes[:2] == [out.nbytes, weight.nbytes]
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_unwanted_gradients_are_none_and_need_no_memory():
    sizes = dict(grad=(2, 64, 16, 16), source=(2, 64, 16, 16), weight=(64, 64, 3, 3), padding=[1, 1])
    with ullage.virtual_gpu("H200") as gpu:
        asked, (data, weight, bias) = backward(gpu, **sizes, mask=(False, True, False))
        assert data is None and bias is None and weight.shape == (64, 64, 3, 3)
        assert asked[0] == weight.nbytes
        _, (data, weight, bias) = backward(gpu, **sizes, mask=(True, False, False))
        assert weight is None and bias is None and data.shape == (2, 64, 16, 16)


def test_bias_gradient_is_the_last_output_asked_for():
    sizes = dict(grad=(2, 24, 16, 16), source=(2, 8, 16, 16), weight=(24, 8, 1, 1))
    with ullage.virtual_gpu("H200") as gpu:
        asked, (_, _, bias) = backward(gpu, **sizes, mask=(True, True, True))
    assert bias.shape == (24,) and asked[-1] == bias.nbytes


def test_an_empty_batch_takes_no_workspace():
    with ullage.virtual_gpu("H200") as gpu:
        arguments = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        sizes, out = requests(gpu, FORWARD, tensor((0, 8, 16, 16)), tensor((8, 8, 3, 3)), *arguments)
    assert sizes == [] and out.shape == (0, 8, 16, 16)


def test_one_dimensional_convolutions_keep_their_shape():
    with ullage.virtual_gpu("H200"):
        layer = torch.nn.Conv1d(4, 6, 3, padding=1, device="cuda")
        x = torch.zeros(2, 4, 32, device="cuda", requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == (2, 6, 32) and x.grad.shape == x.shape and layer.weight.grad.shape == (6, 4, 3)


def test_a_guess_finds_a_workspace_of_copies(without_table):
    # In NCHW the tensor-core kernels work on NHWC copies of input, output and filter.
    source, out, weight = 32 * 256 * 14 * 14 * 2, 32 * 256 * 14 * 14 * 2, 256 * 256 * 9 * 2
    with ullage.virtual_gpu("H200") as gpu:
        arguments = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        sizes, _ = requests(
            gpu, FORWARD, tensor((32, 256, 14, 14), "bf16"), tensor((256, 256, 3, 3), "bf16"), *arguments
        )
    assert sizes[0] == out
    assert len(sizes) == 2 and sizes[1] - (source + out + weight) in (16, 147)


@pytest.mark.parametrize("card", ["A100-40GB", "RTX-4090"])
def test_other_gpus_use_the_trees(card):
    with ullage.virtual_gpu(card) as gpu:
        call = dict(grad=(8, 224, 7, 7), source=(8, 768, 7, 7), weight=(224, 768, 3, 3), kind="bf16", padding=[1, 1])
        sizes, outputs = backward(gpu, **call)
    assert sizes[0] == outputs[0].nbytes and outputs[1].nbytes in sizes


ARCHITECTURES = (7, 5), (8, 0), (8, 6), (8, 9), (12, 0)
# What cuDNN 9.19 answered for each of them, in bytes.
ANSWERS = [
    (("f", (28, 896, 4, 4), (2048, 896, 1, 1), (28, 2048, 4, 4)), (128, 8945680, 8945680, 400, 0)),
    (("d", (64, 432, 6, 6), (192, 432, 1, 1), (64, 192, 6, 6)), (0, 6082576, 2432, 400, 0)),
    (
        ("w", (32, 1152, 6, 6), (216, 1152, 1, 1), (32, 216, 6, 6)),
        (31850896, 31850896, 6303888, 8294544, 9289872),
    ),
]


@pytest.mark.parametrize("sizes, answers", ANSWERS)
def test_each_architecture_has_its_own_cudnn_choices(sizes, answers) -> None:
    problem = ConvolutionProblem(*sizes, (1, 1), (0, 0), (1, 1), 1, "f32", False)
    found = [workspace(problem, capability, 40).size for capability in ARCHITECTURES]
    assert tuple(found) == answers


def test_an_unknown_architecture_may_copy_all_tensors() -> None:
    problem = ConvolutionProblem(*ANSWERS[0][0], (1, 1), (0, 0), (1, 1), 1, "f32", False)
    known, other = workspace(problem, (9, 0), 40), workspace(problem, (10, 0), 148)
    assert other.size == known.size
    assert other.larger >= 4 * (28 * 896 * 16 + 2048 * 896 + 28 * 2048 * 16)


def test_without_cudnn_columns_take_the_place_of_its_workspace():
    with ullage.virtual_gpu("H200") as gpu, torch.backends.cudnn.flags(enabled=False):
        arguments = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        sizes, out = requests(gpu, FORWARD, tensor((2, 8, 16, 16)), tensor((8, 8, 3, 3)), *arguments)
    assert sizes == [out.nbytes, 8 * 9 * 16 * 16 * 4, 32 << 20]  # and the workspace of cuBLAS, which multiplies


@pytest.mark.parametrize(("channels", "known"), [(64, True), (67, False)])
def test_the_bound_leaves_room_for_a_guess_that_is_not_sure(channels, known):
    with ullage.virtual_gpu("H200") as gpu:
        layer = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False).cuda()
        layer(torch.zeros(32, channels, 56, 56, device="cuda", requires_grad=True)).sum().backward()
    room = gpu.upper - gpu.process_memory
    assert (gpu.uncertainty.surprise == 0) is known
    assert room >= 2 * gpu.uncertainty.surprise
    assert (room <= 28 * 2**20) is known  # a segment, and what contexts differ by


def test_a_transposed_layer_copies_a_gradient_once_for_both():
    """As recorded on an H200 in a U-Net, where the gradient is a slice of that of a concatenation."""
    with ullage.virtual_gpu("H200") as gpu:
        source = torch.zeros(8, 200, 22, 22, device="cuda", requires_grad=True)
        layer = torch.nn.ConvTranspose2d(200, 144, 2, stride=2, bias=False).cuda()
        out = layer(source)
        other = torch.zeros(8, 288, 44, 44, device="cuda")
        taken: list[tuple[int, int]] = []
        gpu.memory.allocator.on_event = lambda action, _, size: taken.append((action, size))
        out.backward(other[:, :144])
    copy = out.nbytes
    assert taken[0] == (0, copy) and [size for action, size in taken if action == 0].count(copy) == 1
    assert [size for action, size in taken if action == 0][1] == source.nbytes
