"""bitsandbytes on a virtual GPU: its own code says what its operators take, and nothing of its library is called."""

import pytest
import torch

import ullage
from ullage.errors import UnsupportedOperation

pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed")
WIDE, HIGH, TOKENS = 2048, 1024, 2048


@pytest.fixture
def bitsandbytes():
    """A virtual GPU, and the package as it is imported where there is a GPU."""
    with ullage.virtual_gpu("H200") as gpu:
        import bitsandbytes

        bitsandbytes.gpu = gpu
        yield bitsandbytes


def peak_over(gpu, work) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_in_4_bits(bitsandbytes, kind):
    layer = bitsandbytes.nn.Linear4bit(
        WIDE, HIGH, bias=False, compute_dtype=torch.bfloat16, quant_type=kind, compress_statistics=False
    )
    taken = peak_over(bitsandbytes.gpu, layer.cuda)
    weight, blocks = WIDE * HIGH // 2, WIDE * HIGH // 64
    assert torch.cuda.memory_allocated() == pytest.approx(weight + blocks * 4, abs=4096)
    assert taken >= WIDE * HIGH * 4  # the weight in 32 bits is on the GPU while it is quantized
    x = torch.zeros(TOKENS, WIDE, device="cuda", dtype=torch.bfloat16)
    taken = peak_over(bitsandbytes.gpu, lambda: layer(x))
    assert taken >= (TOKENS * HIGH + WIDE * HIGH) * 2  # so many rows are multiplied with the weight in 16 bits
    one = peak_over(bitsandbytes.gpu, lambda: layer(x[:1]))
    assert one < WIDE * HIGH  # a single one is not
    assert not any("no operator of PyTorch" in note for note in bitsandbytes.gpu.notes)


def test_adapters_train_next_to_weights_in_8_bits(bitsandbytes):
    layer = bitsandbytes.nn.Linear8bitLt(WIDE, HIGH, bias=False, has_fp16_weights=False, threshold=6.0).cuda()
    assert torch.cuda.memory_allocated() == pytest.approx(WIDE * HIGH + HIGH * 4, abs=4096)
    x = torch.zeros(TOKENS, WIDE, device="cuda", dtype=torch.float16, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape


def test_optimizers_with_state_in_8_bits(bitsandbytes):
    weight = torch.nn.Parameter(torch.zeros(WIDE, HIGH, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    before = torch.cuda.memory_allocated()
    optimizer = bitsandbytes.optim.Adam8bit([weight])
    optimizer.step()
    assert weight.numel() * 2 <= torch.cuda.memory_allocated() - before < weight.numel() * 3
    with pytest.raises(UnsupportedOperation, match="without 'paged' in its name"):
        bitsandbytes.optim.PagedAdam8bit([weight]).step()
