"""Operators that a CPU build of PyTorch would decompose without cuDNN and fused attention: linear layers, batch
normalization, attention. While a virtual GPU is in use they are decomposed here as in a CUDA build."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ullage.units import INT_MAX
from ullage.virtual.call.plan import LOW_PRECISION, gpu_handler, handler
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.operators import recurrent
from ullage.virtual.operators.attention import is_deterministic
from ullage.virtual.releases import MEASURED, Release
from ullage.virtual.state import GPUState, gpus_in_use

# The kernel of `scaled_dot_product_attention`: the first in order of preference whose conditions hold
# (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Not covered: nested tensors.

CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"
_CODES = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}  # at::SDPBackend: math 0, flash 1, efficient 2, cudnn 3


class AttentionArguments(NamedTuple):
    """The arguments of `scaled_dot_product_attention` that decide which kernel runs."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool

    @property
    def trains(self) -> bool:
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def choose_attention_kernel(
    attention: AttentionArguments, capability: tuple[int, int], release: Release = MEASURED
) -> str:
    """Return the kernel that a release selects on a GPU of this compute capability: "cudnn", "flash", "efficient" or
    "math"."""
    able = {CUDNN: _cudnn, FLASH: _flash_serves, EFFICIENT: _efficient}
    for name in _order(capability, release):
        if name == MATH:
            if torch._C._get_math_sdp_enabled():
                return MATH
        elif able[name](attention, capability, release):
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(capability: tuple[int, int], release: Release) -> list[str]:
    """priority_order: the release's, unless the program set another."""
    written = [_CODES[int(code)] for code in torch._C._get_sdp_priority_order() if int(code) in _CODES]
    default = [FLASH, EFFICIENT, MATH, CUDNN]
    if release.prefers_cudnn_attention(capability) and written[:4] == default:
        return [CUDNN, FLASH, EFFICIENT, MATH]
    return written


def _cudnn(attention: AttentionArguments, capability: tuple[int, int], release: Release) -> bool:
    """can_use_cudnn_attention"""
    query, key, value = attention[:3]
    if not torch._C._get_cudnn_sdp_enabled() or capability < (8, 0):
        return False
    if is_deterministic() or not (_is_usual(attention, LOW_PRECISION) and _mask_suits_cudnn(attention)):
        return False
    if release.cudnn_drops_sixteenths_only and attention.dropout * 16 % 1:
        return False
    heads = query.shape[3], value.shape[3]
    if not release.cudnn_takes_heads(heads, capability, attention.trains) or max(query.shape[:2]) > 65535:
        return False
    return key.shape[2] != 1 and not (attention.dropout and query.shape[2] == 1)


def _flash_serves(attention: AttentionArguments, capability: tuple[int, int], release: Release) -> bool:
    """can_use_flash_attention"""
    query, key, value = attention[:3]
    if not torch._C._get_flash_sdp_enabled() or capability < (8, 0) or attention.mask is not None:
        return False
    if not _is_usual(attention, LOW_PRECISION):
        return False
    size = query.shape[-1]
    if size > 256 or key.shape[-1] != size or value.shape[-1] != size:
        return False
    consumer = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    if attention.trains and consumer and not (size <= 192 or (not attention.dropout and size > 224)):
        return False
    return not (attention.causal and query.shape[-2] != key.shape[-2])


def _efficient(attention: AttentionArguments, capability: tuple[int, int], release: Release) -> bool:
    """can_use_mem_efficient_attention"""
    query, key, value = attention[:3]
    types = (torch.float16, torch.float32, torch.bfloat16) if capability >= (8, 0) else (torch.float16, torch.float32)
    if not torch._C._get_mem_efficient_sdp_enabled() or not _is_usual(attention, types, ignore_single=False):
        return False
    if query.shape[1] != key.shape[1] and not release.efficient_attention_groups_heads:
        return False
    alignment = minimum_alignment(query.dtype, capability)
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % alignment or value.shape[-1] % alignment:
        return False
    needs_aligned = release.efficient_attention_needs_aligned_offsets and capability >= (8, 0)
    return not (needs_aligned and any(tensor.storage_offset() % alignment for tensor in attention[:3]))


def minimum_alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """minimum_gemm_alignment: elements."""
    half = dtype in LOW_PRECISION
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    alignment = 4 if capability >= (8, 0) else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def _is_usual(attention: AttentionArguments, types: tuple[torch.dtype, ...], ignore_single: bool = True) -> bool:
    """Check the conditions of all kernels: type, four dimensions, heads that agree, contiguous elements."""
    query, key, value = tensors = attention[:3]
    if query.dtype not in types or any(tensor.dtype != query.dtype or tensor.dim() != 4 for tensor in tensors):
        return False
    heads = [tensor.shape[1] for tensor in tensors]
    agree = heads[0] % heads[1] == 0 if attention.grouped else heads[0] == heads[1]
    if not (agree and heads[1] == heads[2] and query.shape[0] == key.shape[0] == value.shape[0]):
        return False
    if query.shape[-2] == 0 or key.shape[-2] == 0:
        return False
    mask = attention.mask
    mask_fits = mask is None or mask.stride(-1) == 1 or mask.shape[-1] == 1
    return mask_fits and all(one.stride(-1) == 1 or (ignore_single and one.shape[-1] == 1) for one in tensors)


def _mask_suits_cudnn(attention: AttentionArguments) -> bool:
    """check_attn_mask_shape"""
    mask = attention.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    lengths = attention.query.shape[2], attention.key.shape[2]
    if mask.shape[-2] not in (1, lengths[0]) or mask.shape[-1] not in (1, lengths[1]):
        return False
    if mask.dim() == 2:
        return True
    return mask.shape[0] in (1, attention.query.shape[0]) and mask.shape[1] in (1, attention.query.shape[1])


_aten = torch.ops.aten


def install(gpu: GPUState, replacements: Replacements) -> None:
    library: Any = torch.library.Library("aten", "IMPL")
    replacements.on_undo(library._destroy)
    for name, function in _DECOMPOSED.items():
        torch.library._impls.discard(f"aten/{name}/AutogradCUDA")  # an enclosing virtual GPU may have registered it
        library.impl(name, function, "AutogradCUDA")
    _register_missing_kernels(library)
    recurrent.install(gpu, library, replacements)


# Operators that have a CUDA kernel and a formula for all other devices. On a CPU build, with no kernel for CUDA,
# autograd would take the formula and the mode would see its parts.
_KERNEL_OR_FORMULA = ("silu_backward", "mish_backward", "_fused_rms_norm")


def _register_missing_kernels(library: torch.library.Library) -> None:
    def never_called(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the virtual GPU's mode comes before this kernel")

    for name in _KERNEL_OR_FORMULA:
        if not hasattr(torch.ops.aten, name):  # newer than this PyTorch
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            torch.library._impls.discard(f"aten/{name}/CUDA")
            library.impl(name, never_called, "CUDA")


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Linear.cpp; here because PyTorch's adds the bias out of place under a dispatch mode."""
    if bias is None:
        return torch.matmul(input, weight.t())
    if input.dim() == 2:
        return torch.addmm(bias, input, weight.t())
    if input.dim() > 2 and input.is_contiguous():
        flat = torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight.t())
        return flat.view(*input.shape[:-1], flat.shape[-1])
    return torch.matmul(input, weight.t()).add_(bias)


def batch_norm(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, enabled: bool
) -> Any:
    """Normalization.cpp, _select_batch_norm_backend and _batch_norm_impl_index."""
    if _cudnn_normalizes(input, weight, bias, mean, var, training, eps, enabled):
        fmt = torch._prims_common.suggest_memory_format(input)
        dense = input.contiguous(memory_format=fmt)
        return _first(_aten.cudnn_batch_norm(dense, weight, bias, mean, var, training, momentum, eps))
    return _first(_aten.native_batch_norm(input, weight, bias, mean, var, training, momentum, eps))


def _first(results: Any) -> Any:
    """Return the first result. C++ releases the others from the first on, a Python tuple from the last on."""
    held = list(results)
    del results
    first = held[0]
    for place in range(len(held)):
        held[place] = None
    return first


def _cudnn_normalizes(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, eps: float, enabled: bool
) -> bool:
    if not (enabled and torch._C._get_cudnn_enabled()) or weight is None or bias is None:
        return False
    if torch.bfloat16 in (input.dtype, weight.dtype):
        return False
    if input.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    tracked = (mean is not None and var is not None) or (mean is None and var is None and training)
    batch_limit = 880801 if training else 65535
    return tracked and input.dim() >= 3 and input.shape[0] <= batch_limit and eps >= 0.0 and input.numel() < INT_MAX


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """attention.cpp, scaled_dot_product_attention"""
    attention = AttentionArguments(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    gpu = gpus_in_use[-1]
    kernel = choose_attention_kernel(attention, gpu.spec.capability, gpu.release)
    gpu.attention_kernels.add(kernel)
    if kernel == CUDNN:  # it reads masks of flags directly
        return _first(
            _aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, attention.trains, dropout_p, is_causal, False, scale=scale
            )
        )
    mask = _additive(attn_mask, query.dtype)
    if kernel == FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if kernel == EFFICIENT:
        if mask is not None:
            mask = _padded_mask(mask, query, key)
        return _first(
            _aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, attention.trains, dropout_p, is_causal, scale=scale
            )
        )
    return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def _additive(mask: Any, dtype: torch.dtype) -> Any:
    """convert_boolean_attn_mask: a mask of flags becomes one of numbers to add."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))


def _flash(query: Any, key: Any, value: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    """Run flash attention, which needs head sizes that are multiples of 8."""
    size = query.shape[-1]
    scale = size**-0.5 if scale is None else scale
    missing = -size % 8
    if missing:
        query, key, value = (torch.constant_pad_nd(tensor, [0, missing]) for tensor in (query, key, value))
    out = _first(_aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale))
    return out[..., :size] if missing else out


_MASK_ALIGNMENT = 8  # attention.cpp, preprocess_mask: rows of a mask begin at multiples of 8 elements


def _padded_mask(mask: Any, query: Any, key: Any) -> Any:
    target = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    missing = -mask.shape[-1] % _MASK_ALIGNMENT
    if missing:
        last = mask.shape[-1]
        mask = torch.constant_pad_nd(mask, [0, missing])[..., :last]
    return mask.expand(target)


def _math(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None, grouped: bool
) -> Any:
    """_scaled_dot_product_attention_math; written out because PyTorch's adds the mask out of place under a mode."""
    kind = query.dtype
    if kind in (torch.float16, torch.bfloat16) and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        query, key, value = query.float(), key.float(), value.float()
    factor = (query.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
    query = query * (-factor if scale is not None and scale < 0 else factor)
    if causal:
        ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        mask = _additive(ones.tril(), query.dtype)
    if grouped and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        weights.add_(mask)
    weights = _aten._safe_softmax(weights, -1)
    if dropout > 0.0:
        weights = torch.dropout(weights, dropout, True)
    return torch.matmul(weights, value).to(kind)


def transformer_encoder_layer(
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """transformer.cpp: a layer of `nn.TransformerEncoder` in evaluation mode, which PyTorch calls as one operator."""

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return torch.layer_norm(x, (embed_dim,), weight, bias, eps)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    x = _self_attention(x, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask)
    x.add_(src)
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    before = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    flat = _aten._addmm_activation(ffn_bias_1, x.reshape(-1, embed_dim), ffn_weight_1.t(), use_gelu=use_gelu)
    x = torch.addmm(ffn_bias_2, flat, ffn_weight_2.t()).view(src.shape)
    del flat
    x.add_(before)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


def _self_attention(
    x: Any, heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any, proj_bias: Any, mask: Any
) -> Any:
    """attention.cu, native_multi_head_attention_cuda: fused attention if a kernel supports it."""
    batch, length, size = x.shape
    head = size // heads
    split = x.view(batch, length, heads, head).transpose(1, 2)
    arguments = AttentionArguments(split, split, split, None, 0.0, False, False)
    gpu = gpus_in_use[-1]
    kernel = choose_attention_kernel(arguments, gpu.spec.capability, gpu.release)
    if mask is None and head % 8 == 0 and kernel != MATH:
        packed = torch.nn.functional.linear(x, qkv_weight, qkv_bias)
        parts: Any = (part.view(batch, length, heads, head).transpose(1, 2) for part in packed.chunk(3, -1))
        out = torch.nn.functional.scaled_dot_product_attention(*parts)
        return torch.nn.functional.linear(out.transpose(1, 2).reshape(batch, length, size), proj_weight, proj_bias)
    packed = torch.matmul(x, qkv_weight.t())
    query, key, value = torch.empty((3, batch, heads, length, head), dtype=x.dtype, device=x.device)
    del packed
    flags = None if mask is None else mask.to(torch.bool)
    weights = torch.softmax(torch.matmul(query, key.transpose(-2, -1)), -1)
    del flags
    out = torch.matmul(weights, value)
    del weights
    return torch.nn.functional.linear(out.transpose(1, 2).reshape(batch, length, size), proj_weight, proj_bias)


@gpu_handler("aten.linalg_pinv.atol_rtol_tensor")
def pinv(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """LinearAlgebra.cpp, linalg_pinv: one operator with a gradient of its own, of several kernels."""
    matrix = args[0]
    with gpu.mode:
        absolute, relative = (
            kwargs[name] if kwargs.get(name) is not None else torch.zeros((), dtype=torch.float64, device="cuda")
            for name in ("atol", "rtol")
        )
        if matrix.numel() == 0:
            return torch.empty(
                *matrix.shape[:-2], matrix.shape[-1], matrix.shape[-2], dtype=matrix.dtype, device="cuda"
            )
        if args[1] if len(args) > 1 else kwargs.get("hermitian", False):
            values, vectors = torch.linalg.eigh(matrix)
            sizes, left, right = values.abs(), vectors, vectors.mH
        else:
            left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
            values = sizes
        limit = torch.maximum(absolute.unsqueeze(-1), relative.unsqueeze(-1) * sizes.amax(-1, keepdim=True))
        inverse = torch.where(sizes > limit, values.reciprocal(), 0.0).to(matrix.dtype)
        del sizes, values, limit
        return torch.matmul(right.mH * inverse.unsqueeze(-2), left.mH)


_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "batch_norm": batch_norm,
    "linear": linear,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "_transformer_encoder_layer_fwd": transformer_encoder_layer,
}
for _name, _function in _DECOMPOSED.items():
    handler(f"aten.{_name}.default")(recurrent.under_inference_mode(_function))
