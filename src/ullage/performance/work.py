"""The work of an operator call on a GPU, by the shapes of its arguments: floating-point operations, bytes, and the
numbers that its time depends on. Nothing here imports PyTorch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.hardware.specification import GPU
from ullage.performance.data_sheet import RATES_SHARE, SHORTEST_KERNEL_S, UNKNOWN_BANDWIDTH, UNKNOWN_TFLOPS
from ullage.performance.sequential_kernels import Serial, serial_of

_NAMES_BY_SIZE = {
    16: "complex128",
    8: "float64 int64 complex64",
    4: "float32 int32 uint32",
    2: "float16 bfloat16 int16 uint16",
    1: "bool uint8 int8 float8_e4m3fn float8_e5m2",
}
_SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
_NARROW = ("float16", "bfloat16")
_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0, "addbmm": 1, "_addmm_activation": 1}
_CONVOLUTIONS = ("convolution", "_convolution", "convolution_overrideable")

_SUMMING = ("triton_red_", "triton_per_")  # compiled kernels that reduce many numbers to one

KINDS = ("product", "convolution", "convolution_backward", "attention", "recurrent", "lists", "transfer", "other")
Tensor = Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """The work of one call.

    `kind` names the kind of its kernels, `shape` has the numbers that their time depends on, besides `flops` and the
    least bytes `read` and `written`. `dtype` is the first floating-point type among its tensors. `serial` describes the
    few kernels that work on samples one after the other.
    """

    kind: str
    operator: str
    flops: float
    read: int
    written: int
    dtype: str
    tf32: bool
    shape: Mapping[str, float]
    serial: Serial | None = None

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def on_tensor_cores(self) -> bool:
        return self.flops > 0 and (self.dtype in _NARROW or self.tf32)

    def least_time(self, gpu: GPU) -> float:
        """Return the least seconds that a GPU needs for it, by its data sheet."""
        moving, computing = self.bytes / (RATES_SHARE * bandwidth_of(gpu)), self.flops / (RATES_SHARE * self.rate(gpu))
        return max(moving, computing, SHORTEST_KERNEL_S)

    def rate(self, gpu: GPU) -> float:
        return rate_of(gpu, self.dtype, self.tf32)


def rate_of(gpu: GPU, dtype: str, tf32: bool) -> float:
    """Return a GPU's floating-point operations per second by its data sheet, on tensor cores if possible."""
    plain = gpu.fp32_tflops or UNKNOWN_TFLOPS
    if dtype in _NARROW:
        of_type = gpu.bf16_tflops if dtype == "bfloat16" else gpu.fp16_tflops
        return 1e12 * (of_type or gpu.fp16_tflops or plain)
    return 1e12 * ((gpu.tf32_tflops or plain) if tf32 else plain)


def bandwidth_of(gpu: GPU) -> float:
    return 1e9 * (gpu.bandwidth or UNKNOWN_BANDWIDTH)


def work_of(call: Mapping[str, Any]) -> Work:
    space, name = str(call["operator"]).split(".")[:2]
    given = list(tensors_of([call["args"], call["kwargs"]]))
    made = list(tensors_of(call["outputs"]))
    if space == "triton":
        # Not timed: it gets the time of an operator that moves its tensors once. Its results come last.
        name = "sum" if name.startswith(_SUMMING) else "add"
        given, made = given[:-1] or given, given[-1:]
    elif not made and name.endswith("_") and call["args"]:
        # Written in place: the first list; for a fused optimizer, all lists but the gradients.
        several = [0, *range(2, 5)] if name.startswith("_fused_") else [0]
        made = list(tensors_of([value for place, value in enumerate(call["args"]) if place in several]))
    read, written = sum(map(bytes_of, given)), sum(map(bytes_of, made))
    kind, flops, shape = _kind(name, call, given, made)
    types = [tensor["dtype"] for tensor in given + made]
    dtype = next((each for each in types if "float" in each or "complex" in each), "int")
    tf32 = dtype == "float32" and bool(call.get("tf32", kind.startswith("convolution") or kind == "recurrent"))
    return Work(kind, name, float(flops), read, written, dtype, tf32, shape, serial_of(name, call, read + written))


def _kind(
    name: str, call: Mapping[str, Any], given: list[Tensor], made: list[Tensor]
) -> tuple[str, float, dict[str, float]]:
    args = call["args"]
    if name in ("_to_copy", "copy_") and any(tensor.get("cpu") and tensor["shape"] for tensor in given + made):
        return "transfer", 0, {"to_host": float(any(tensor.get("cpu") for tensor in made))}
    if name in _PRODUCTS and len(given) > _PRODUCTS[name] + 1:
        first = _PRODUCTS[name]
        return "product", *_product(given[first], given[first + 1], bias=first > 0)
    if name in _CONVOLUTIONS:
        return "convolution", *_convolution(given[0], given[1], made[0], args[3:], [True, False, False])
    if name == "convolution_backward":
        return "convolution_backward", *_convolution(given[1], given[2], given[0], args[4:], args[10])
    if "attention" in name and len(given) > 2:
        return "attention", *_attention(name, given, args)
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach")):
        return "lists", 0, _lists(call, given)
    if "_rnn" in name:
        return "recurrent", *_recurrent(name, given, made, args)
    return "other", 0, _elementwise(call, given, made)


def _product(left: Tensor, right: Tensor, bias: bool) -> tuple[float, dict[str, float]]:
    rows, inner = left["shape"][-2:]
    columns, batch = right["shape"][-1], math.prod(left["shape"][:-2])
    tiles = batch * -(-rows // 128) * -(-columns // 128)
    return 2 * batch * rows * columns * inner, {
        **_logs(rows=rows, columns=columns, inner=inner, batch=batch, tiles=tiles, smaller=min(rows, columns)),
        **_floats(bias=bias, left_turned=layout_of(left), right_turned=layout_of(right)),
        **_floats(even_rows=evenness(rows), even_columns=evenness(columns), even_inner=evenness(inner)),
    }


def _convolution(
    source: Tensor, weight: Tensor, result: Tensor, settings: Sequence[Any], wanted: Sequence[bool]
) -> tuple[float, dict[str, float]]:
    """`result` is the output or its gradient, `wanted` the gradients: of the source, the weight and the bias."""
    stride, _, dilation, transposed = settings[:4]
    groups = settings[5]
    passes = max(1, sum(map(bool, wanted[:2])))
    inner, outer = source["shape"][1], result["shape"][1]
    window, places = math.prod(weight["shape"][2:]), math.prod(result["shape"][2:])
    flops = 2 * numel(source if transposed else result) * math.prod(weight["shape"][1:]) * passes
    batch, source_places = source["shape"][0], math.prod(source["shape"][2:])
    wants_source, wants_weight, wants_bias = map(bool, wanted[:3])
    return flops, {
        **_logs(batch=batch, inner=inner, outer=outer, places=places, source_places=source_places, window=window),
        **_logs(groups=groups, rows=batch * places, depth=inner // groups * window),
        **_floats(stride=max(stride), dilation=max(dilation), dimensions=len(weight["shape"]) - 2),
        **_floats(depthwise=groups == inner > 1, transposed=bool(transposed)),
        **_floats(layout=layout_of(source), of_weight=layout_of(weight)),
        **_floats(even_inner=evenness(inner // groups), even_outer=evenness(outer // groups)),
        **_floats(wants_source=wants_source, wants_weight=wants_weight, wants_bias=wants_bias),
    }


def _attention(name: str, given: list[Tensor], args: Sequence[Any]) -> tuple[float, dict[str, float]]:
    backward = "backward" in name
    query, key = given[1:3] if backward else given[:2]
    length, width = query["shape"][-2:]
    others = key["shape"][-2]
    batch = math.prod(query["shape"][:-2])
    flops = 4 * batch * length * others * width * (2.5 if backward else 1)
    return flops, {
        **_logs(batch=batch, length=length, others=others, width=width),
        **_floats(flash="flash" in name, efficient="efficient" in name, cudnn="cudnn" in name),
        **_floats(backward=backward, causal=any(value is True for value in args)),
    }


def _lists(call: Mapping[str, Any], given: list[Tensor]) -> dict[str, float]:
    sizes = [numel(tensor) for tensor in given if not tensor.get("cpu")]
    lists = sum(isinstance(value, list) for value in call["args"])
    return {
        **_logs(tensors=len(sizes), largest=max(sizes, default=0), numbers=sum(sizes)),
        **_floats(same="same" in call, lists=lists),
    }


def _recurrent(
    name: str, given: list[Tensor], made: list[Tensor], args: Sequence[Any]
) -> tuple[float, dict[str, float]]:
    """cuDNN's recurrent layers: products over all steps at once, then one step after the other."""
    source = given[0]
    length, batch = source["shape"][:2] if len(source["shape"]) > 2 else (source["shape"][0], 1)
    weights = [tensor for tensor in given[1:] if len(tensor["shape"]) == 2]
    buffers = [numel(tensor) for tensor in made if len(tensor["shape"]) == 1]
    numbers = max(sum(map(numel, weights)), max(buffers, default=0))
    backward = "backward" in name
    flops = 2 * length * batch * numbers * (2 if backward else 1)
    hidden = max((tensor["shape"][-1] for tensor in weights), default=1)
    steps = length * max(len(weights) // 2, 1)
    return flops, {
        **_logs(length=length, batch=batch, width=source["shape"][-1], inner=hidden),
        **_logs(tensors=len(weights), numbers=numbers, steps=steps),
        **_floats(backward=backward),
    }


def _elementwise(call: Mapping[str, Any], given: list[Tensor], made: list[Tensor]) -> dict[str, float]:
    everything = given + made
    if not everything:
        return {}
    largest = max(everything, key=numel)
    result = made[0] if made else largest
    read = max((numel(tensor) for tensor in given), default=0)
    shape = largest["shape"] or [1]
    alike = {tuple(tensor.get("stride", ())) for tensor in everything if tensor["shape"] == shape}
    lists = [value for value in call["args"] if isinstance(value, list) and value]
    windows = [math.prod(value) for value in lists if all(type(size) is int for size in value)]
    second = shape[1] if len(shape) > 1 else 1
    last_of_result = result["shape"][-1] if result["shape"] else 1
    return {
        **_logs(result=numel(result), source=read, ratio=16 * read / max(numel(result), 1)),
        **_logs(first=shape[0], second=second, last=shape[-1], last_of_result=last_of_result),
        **_logs(each=numel(largest) / max(second, 1), window=abs(windows[0]) if windows else 1),
        **_floats(dimensions=len(shape), orders=len(alike), tensors=len(given), even_last=evenness(shape[-1])),
        **_floats(layout=max(map(layout_of, given), default=0), of_result=layout_of(result)),
        **_floats(width=_SIZES.get(largest["dtype"], 4), stride=largest.get("stride", [1])[-1:] not in ([], [1])),
        **_floats(spread=any(numel(tensor) != numel(result) for tensor in given if tensor["shape"])),
    }


def _logs(**numbers: float) -> dict[str, float]:
    return {name: math.log2(max(number, 1)) for name, number in numbers.items()}


def _floats(**numbers: float) -> dict[str, float]:
    return {name: float(number) for name, number in numbers.items()}


def evenness(size: int) -> float:
    """Return the number of lowest bits that are zero, at most 4: it shows the alignment of rows."""
    return math.log2(math.gcd(size, 16)) if size else 4.0


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the arguments of a call, at any depth."""
    if isinstance(value, dict):
        if "shape" in value:
            yield value
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and "shape" in item:  # without a further generator: lists are long
                yield item
            elif isinstance(item, dict | list):
                yield from tensors_of(item)


def numel(tensor: Tensor) -> int:
    return math.prod(tensor["shape"])


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's data; those of an expanded tensor count once."""
    sizes = tensor["shape"]
    if "stride" in tensor:
        sizes = [size for size, stride in zip(sizes, tensor["stride"], strict=True) if stride]
    return math.prod(sizes) * _SIZES.get(tensor["dtype"], 4)


def layout_of(tensor: Tensor) -> int:
    """Return 0 for a contiguous tensor, 1 for a dense one in another order (channels last, transposed), 2 with gaps."""
    if "stride" not in tensor:
        return 0
    dense = 1
    for stride, size in sorted((b, n) for n, b in zip(tensor["shape"], tensor["stride"], strict=True) if n > 1 and b):
        if stride != dense:
            return 2
        dense *= size
    return 1
