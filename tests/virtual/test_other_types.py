"""Nested tensors, quantized types and transformed functions: what they ask of the allocator, as an H200 did."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from tests.virtual.recording import recorded_events
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import ullage
from ullage.errors import UnsupportedOperation


@pytest.fixture
def gpu():
    with ullage.virtual_gpu("H200") as gpu:
        gpu.libraries.need = lambda library: None
        yield gpu


def test_gradients_of_each_sample(gpu):
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, x, y):
        return F.cross_entropy(functional_call(model, weights, (x.unsqueeze(0),)), y.unsqueeze(0))

    x, y = torch.ones(31, 20, device="cuda"), torch.zeros(31, dtype=torch.int64, device="cuda")
    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    assert found["0.weight"].shape == (31, 64, 20) and found["0.weight"].is_cuda
    assert jacrev(model)(x[:1]).shape == (1, 10, 1, 20)


def test_derivatives_in_forward_mode(gpu):
    x, t = torch.ones(512, 256, device="cuda"), torch.ones(512, 256, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y, tangent = jvp(torch.sin, (x,), (t,))
    assert y.is_cuda and tangent.shape == (512, 256)
    assert torch.cuda.memory_allocated() - before == 2 * x.nbytes  # and the cosine for a while
    assert torch.cuda.max_memory_allocated() - before == 3 * x.nbytes
    assert jacfwd(torch.sin)(x[0, :8]).shape == (8, 8)


def test_a_tangent_of_zeros_takes_no_memory(gpu):
    """The weight's tangent times the input: the input has none, so a product of zeros is added, made of one zero."""
    weight, x = torch.ones(256, 512, device="cuda"), torch.ones(64, 512, device="cuda")
    bias = torch.ones(256, device="cuda")
    with recorded_events(gpu) as events:
        jvp(lambda w: F.linear(x, w, bias), (weight,), (torch.ones_like(weight),))
    copied = events.index(x.nbytes)  # the zeros, for their product alone
    assert events[copied + 1] == -1 - sum(size >= 0 for size in events[:copied])
    assert x.nbytes not in events[copied + 1 :]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_attention_over_jagged_tensors(gpu, kind):
    layer = nn.Linear(64, 64).cuda().to(kind)
    parts = [torch.ones(length, 64, dtype=kind, device="cuda") for length in (17, 80)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    heads = layer(nested).unflatten(-1, [4, -1]).transpose(1, 2)
    out = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
    assert out.values().shape == (97, 64)
    out.values().sum().backward()
    assert layer.weight.grad.shape == (64, 64)
    padded = layer(nested).to_padded_tensor(0.0)
    assert padded.shape == (2, 80, 64)
    with recorded_events(gpu) as events:
        padded.sum().backward()  # goes back through the places that are no padding
    rows = 97 * 64 * padded.element_size()
    assert rows in [size for before, size in pairwise(events) if before == rows]  # and an unused tensor like it before
    assert layer.weight.grad.shape == (64, 64)
    assert next(row["output"] for row in gpu.origins.layers() if row["class"] == "Linear") == [2, None, 64]


def test_nested_tensors_of_the_strided_layout_are_refused(gpu):
    for parts, options in (([torch.ones(3, 4)], {"device": "cuda"}), ([torch.ones(3, 4, device="cuda")], {})):
        with pytest.raises(UnsupportedOperation, match=r"strided layout: give layout=torch\.jagged"):
            torch.nested.nested_tensor(parts, **options)
    assert torch.nested.nested_tensor([torch.ones(3, 4)]).is_nested


def test_rounding_as_if_quantized(gpu):
    x = torch.ones(761, 281, device="cuda", requires_grad=True)
    with recorded_events(gpu) as events:
        torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255).sum().backward()
    assert events[:2] == [855364, 213841] and [size for size in events if size > 855000] == [855364, 855364]
    weight = torch.ones(16, 8, device="cuda", requires_grad=True)
    scales, zeros = torch.ones(16, device="cuda"), torch.zeros(16, dtype=torch.int32, device="cuda")
    torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -128, 127).sum().backward()
    assert weight.grad.shape == (16, 8)


def test_quantized_tensors_and_eight_bits(gpu):
    with pytest.raises(UnsupportedOperation, match="cannot follow a quantized tensor: use torch.int8"):
        torch.quantize_per_tensor(torch.ones(8, device="cuda"), 0.1, 0, torch.qint8)
    eight = torch.ones(64, 64, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    assert torch._scaled_mm(eight, eight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16).shape == (64, 64)
    whole = eight.to(torch.int8)
    assert torch._int_mm(whole, whole).dtype is torch.int32


def test_products_of_eight_bits_take_cublas_workspace():
    with ullage.virtual_gpu("H200") as gpu:
        eight = torch.ones(64, 64, device="cuda").to(torch.float8_e4m3fn)
        one, before = torch.ones((), device="cuda"), gpu.memory.allocator.allocated
        torch._scaled_mm(eight, eight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        assert gpu.memory.allocator.allocated - before >= 32 << 20
