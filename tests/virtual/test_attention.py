"""AttentionArguments: the kernel that is chosen, and what each asks for, beside what an H200 was seen to ask for."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ullage
from ullage.virtual.operators.decompositions import AttentionArguments, choose_attention_kernel

MEASURED = json.loads((Path(__file__).parent / "data" / "operators_h200.json").read_text())
HOPPER, BLACKWELL, AMPERE, VOLTA = (9, 0), (10, 0), (8, 0), (7, 0)


def attention(dtype=torch.bfloat16, size=64, length=128, keys=None, mask=None, dropout=0.0, causal=False, heads=8):
    query = torch.empty(2, heads, length, size, dtype=dtype)
    key = torch.empty(2, heads, keys or length, size, dtype=dtype)
    return AttentionArguments(query, key, key, mask, dropout, causal, False)


def grouped(dtype):
    """Twice as many heads of the query as of the keys."""
    query, key = torch.empty(2, 8, 128, 64, dtype=dtype), torch.empty(2, 4, 128, 64, dtype=dtype)
    return AttentionArguments(query, key, key, None, 0.0, True, True)


@pytest.mark.parametrize(
    ("given", "capability", "expected"),
    [
        (attention(), HOPPER, "cudnn"),
        (attention(), AMPERE, "flash"),
        (attention(torch.float32), HOPPER, "efficient"),
        (attention(torch.float16), VOLTA, "efficient"),
        (attention(torch.bfloat16), VOLTA, "math"),
        (attention(torch.float64), HOPPER, "math"),
        (attention(size=36), HOPPER, "flash"),
        (attention(size=256), HOPPER, "cudnn"),
        (attention(size=256), BLACKWELL, "flash"),
        (attention(mask=torch.zeros(128, 128, dtype=torch.bfloat16)), HOPPER, "cudnn"),
        (attention(mask=torch.zeros(2, 8, 128, 128, requires_grad=True)), HOPPER, "efficient"),
        (attention(mask=torch.zeros(128, 128, dtype=torch.bfloat16)), AMPERE, "efficient"),
        (attention(causal=True, length=64, keys=128), AMPERE, "efficient"),
        (attention(torch.float32, size=30), HOPPER, "math"),
        (grouped(torch.float32), HOPPER, "math"),
        (grouped(torch.bfloat16), HOPPER, "cudnn"),
    ],
)
def test_the_kernel_is_chosen_as_pytorch_chooses(given, capability, expected):
    assert choose_attention_kernel(given, capability) == expected


def test_switches_and_sdpa_kernel_are_obeyed():
    with sdpa_kernel(SDPBackend.MATH):
        assert choose_attention_kernel(attention(), HOPPER) == "math"
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert choose_attention_kernel(attention(), HOPPER) == "flash"
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert choose_attention_kernel(attention(), HOPPER) == "flash"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_the_math_kernel_makes_the_square_matrix():
    def peak(backend):
        with ullage.virtual_gpu("H200") as gpu, sdpa_kernel(backend):
            q = torch.randn(1, 4, 2048, 64, device="cuda", requires_grad=True)
            functional.scaled_dot_product_attention(q, q, q).sum().backward()
        return gpu.peak_allocated

    square = 4 * 2048 * 2048 * 4
    assert peak(SDPBackend.MATH) > peak(SDPBackend.EFFICIENT_ATTENTION) + square


def call(kind, q, k, v, grad, out, sums, number, causal):
    """The operator that was measured."""
    aten = torch.ops.aten
    length, keys = q.shape[2], k.shape[2]
    operators = {
        "eff_fwd": lambda: aten._scaled_dot_product_efficient_attention(q, k, v, None, True),
        "eff_bwd": lambda: aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, sums, number, number, 0.0, [True, True, True, False]
        ),
        "flash_fwd": lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal),
        "flash_bwd": lambda: aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, sums, None, None, length, keys, 0.0, causal, number, number
        ),
        "cudnn_fwd": lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal),
        "cudnn_bwd": lambda: aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, sums, number, number, None, None, None, length, keys, 0.0, causal
        ),
    }
    return operators[kind]()


def requests_of(gpu, run):
    """What a call takes (0) and frees (1), in order."""
    events = []
    gpu.memory.allocator.on_event = lambda action, address, size: events.append((action, size))
    kept = run()
    gpu.memory.allocator.on_event = None
    del kept
    sizes = [size for action, size in events if action == 0]
    return sizes, [0 if action == 0 else 1 for action, _ in events if action in (0, 2)]


def test_every_kernel_asks_for_what_an_h200_was_seen_to_ask_for():
    with ullage.virtual_gpu("H200") as gpu, torch.no_grad():
        for kind, dtype, size, length, keys, causal, events in MEASURED["attention"]:

            def tensor(rows, size=size, dtype=dtype):
                return torch.zeros(2, rows, 4, size, device="cuda", dtype=getattr(torch, dtype)).transpose(1, 2)

            q, k, v, grad, out = tensor(length), tensor(keys), tensor(keys), tensor(length), tensor(length)
            sums, number = torch.zeros(2, 4, length, device="cuda"), torch.zeros((), dtype=torch.int64)
            arguments = (kind, q, k, v, grad, out, sums, number, causal)
            sizes, order = requests_of(gpu, lambda arguments=arguments: call(*arguments))
            expected = [size for action, size in events if action == 0], [action for action, _ in events]
            assert (sizes, order) == expected, (kind, dtype, size, length, keys, causal)


def blocks(size):
    """The allocator hands out blocks of 512 bytes; whether a single number has 2 or 4 changes with the release."""
    return -(-size // 512)


def test_norms_of_lists_ask_for_what_h200_was_seen_to_ask_for():
    with ullage.virtual_gpu("H200") as gpu:
        for name, events in MEASURED["norms"]:
            operation, _, rest = name.partition(" ")
            sizes, _, dtype = rest.rpartition(" ")
            tensors = [torch.zeros(n, device="cuda", dtype=getattr(torch, dtype[6:])) for n in json.loads(sizes)]
            if operation == "foreach_norm":
                got = requests_of(gpu, lambda tensors=tensors: torch._foreach_norm(tensors))
            else:
                parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
                got = requests_of(gpu, lambda parameters=parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0))
            taken = [size for action, size in events if action == "alloc"]
            assert list(map(blocks, got[0])) == list(map(blocks, taken)), name


# Size, heads, feed-forward, batch, length, type, norm first, padding: allocated at most on an H200 with PyTorch 2.11.
ENCODERS = {
    (512, 8, 2048, 16, 256, torch.float32, False, False): 126930944,
    (512, 8, 2048, 16, 256, torch.float32, True, True): 177287168,
    (256, 4, 1024, 16, 256, torch.bfloat16, True, False): 56636416,
    (256, 4, 1024, 3, 77, torch.bfloat16, False, True): 38709248,
    (60, 5, 100, 16, 256, torch.float32, False, False): 42689536,
}


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
def test_a_fused_encoder_needs_as_much_as_its_parts(encoder, without_gradients):
    size, heads, hidden, batch, length, dtype, norm_first, padding = encoder

    def evaluate():
        layer = torch.nn.TransformerEncoderLayer(size, heads, hidden, batch_first=True, norm_first=norm_first)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda().to(dtype).eval()
        x = torch.zeros(batch, length, size, device="cuda", dtype=dtype)
        mask = torch.zeros(batch, length, dtype=torch.bool, device="cuda") if padding else None
        with without_gradients():
            for _ in range(3):
                model(x, src_key_padding_mask=mask)

    assert ullage.estimate(evaluate, gpu="H200").peak_allocated == ENCODERS[encoder]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_mode_takes_the_same_kernels(dtype):
    def run(without_gradients):
        def evaluate():
            model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
            model = model.cuda().to(dtype).eval()
            query = torch.zeros(2, 4, 256, 64, device="cuda", dtype=dtype)
            with without_gradients():
                images = model(torch.zeros(4, 3, 16, 16, device="cuda", dtype=dtype))
                functional.linear(images, images.new_zeros(8, 1568))
                functional.scaled_dot_product_attention(query, query, query)

        e = ullage.estimate(evaluate, gpu="H200")
        return e.attention, e.peak_allocated, e.peak_reserved

    assert run(torch.inference_mode) == run(torch.no_grad)
