"""Every kernel rule against what real operators asked for: sizes, order and frees, on an H200 with PyTorch 2.11.

`data/kernels_h200.jsonl.gz` (a line a call: operator and arguments; sizes asked for and, below zero, frees; outputs) is
part of the project. The large table of the reference data has no frees and is sampled where it is at hand.
"""

import collections
import gzip
import json
import random
from pathlib import Path

import pytest
import torch
from tests.virtual.recording import recorded_events

import ullage
from ullage.virtual.call.plan import contiguous_strides, span_of_elements

HERE = Path(__file__).parent
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64, "b": torch.bool}
TYPES |= {"i64": torch.int64, "i32": torch.int32, "u8": torch.uint8}
SAMPLE = 40  # calls of an operator
# Others have tests of their own; `like` and `new` operators are not kernels.
LEFT_OUT = ("convolution", "attention", "_foreach")


def kind_of(name):
    return TYPES.get(name) or getattr(torch, name.removeprefix("torch."))


def strides_of(size, layout):
    if layout == "c":
        return contiguous_strides(size)
    if layout == "cl":
        inner = contiguous_strides((size[0], *size[2:], size[1]))
        return (inner[0], inner[-1], *inner[1:-1])
    return layout


def argument(gpu, value):
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], list) and isinstance(value[1], str):
        size, kind, stride = value[0], kind_of(value[1]), strides_of(value[0], value[2])
        return gpu.memory.tensor(size, stride, kind, span_of_elements(size, stride) * kind.itemsize)
    if isinstance(value, list) and len(value) == 3 and value[0] == "cpu":
        return torch.zeros(value[1], dtype=kind_of(value[2]))
    if isinstance(value, list):
        return [argument(gpu, item) for item in value]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value[6:])
    if isinstance(value, str) and value.startswith("cuda"):
        return torch.device("cuda", 0)
    return value


def play(gpu, operator, arguments, keywords):
    """The events of one call, sizes above zero and frees below, and its outputs."""
    _, name, overload = operator.split(".")
    args = [argument(gpu, value) for value in arguments]
    options = {key: argument(gpu, value) for key, value in keywords.items()}
    with recorded_events(gpu) as events:
        result = getattr(getattr(torch.ops.aten, name), overload)(*args, **options)
    return events, result


def lines_of(path):
    with gzip.open(path, "rt") as file:
        yield from file


def layout_of(size, stride, kind):
    """Size, type and strides; the stride of a dimension of one element says nothing."""
    return list(size), kind, [step for length, step in zip(size, stride, strict=True) if length > 1]


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, list | tuple) else []


@pytest.fixture
def gpu():
    with ullage.virtual_gpu("H200") as gpu, torch.no_grad():
        gpu.libraries.need = lambda library: None
        yield gpu


def is_there(operator):
    """Whether this PyTorch has the operator as 2.11 has it; `_fused_rms_norm` of 2.8 has no gradient."""
    _, name, overload = operator.split(".")
    newer = name == "_fused_rms_norm" and not hasattr(torch.ops.aten, "_fused_rms_norm_backward")
    return not newer and hasattr(getattr(torch.ops.aten, name, None), overload)


def test_calls_recorded_with_their_frees(gpu):
    wrong = []
    for line in lines_of(HERE / "data" / "kernels_h200.jsonl.gz"):
        (operator, arguments, keywords), real, outputs = json.loads(line)
        if any(word in operator for word in LEFT_OUT) or not is_there(operator):
            continue
        events, result = play(gpu, operator, arguments, keywords)
        made = [tensor for tensor in tensors(result) if tensor.is_cuda]
        wanted = [layout_of(size, strides_of(size, layout), kind_of(kind)) for size, kind, layout in outputs]
        found = [layout_of(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made]
        if events != real or found != wanted:
            wrong.append((operator, arguments, keywords, real, events))
    assert not wrong, wrong[:3]


def test_sample_of_the_table_of_the_ground_truth(gpu, reference):
    rows = collections.defaultdict(list)
    for line in lines_of(reference("groundtruth/kernels_h200.jsonl.gz")):
        operator = line[3 : line.index('"', 3)]
        if not any(word in operator for word in LEFT_OUT) and '"list"' not in line:
            rows[operator].append(line)
    exact, all_calls, wrong = 0, 0, []
    for operator, lines in rows.items():
        for line in random.Random(0).sample(lines, min(SAMPLE, len(lines))):
            (_, arguments, keywords), real, _, count = json.loads(line)
            events, _ = play(gpu, operator, arguments, keywords)
            sizes = [size for size in events if size >= 0]
            all_calls += 1
            if sizes[:60] == real and len(sizes) == count:
                exact += 1
            else:
                wrong.append((operator, arguments, keywords, real, sizes))
    assert exact == all_calls > 1000, (exact, all_calls, wrong[:3])
