"""Cards that nobody measured: what PyTorch's source says about each, beside the H200 that was measured.

Figures are counted by hand from the sources that the rules name.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ullage
from ullage.hardware import gpu as find_gpu
from ullage.virtual.call import dispatch
from ullage.virtual.cudnn.formulas import (
    FORWARD,
    ConvolutionProblem,
    all_copies,
    terms,
)
from ullage.virtual.cudnn.workspaces import workspace
from ullage.virtual.operators import sorting
from ullage.virtual.operators.attention import backward_tiling
from ullage.virtual.operators.recurrent_kernels import GRU, LSTM, RecurrentNetwork
from ullage.virtual.releases import named

CARDS = ("H200", "A100-40GB", "T4", "RTX-4090", "B200")
KIB, MIB = 1 << 10, 1 << 20


def requests_of(gpu, run):
    """Bytes that a call asks for, in order."""
    taken = []
    gpu.memory.allocator.on_event = lambda action, address, size: taken.append(size) if action == 0 else None
    kept = run()
    gpu.memory.allocator.on_event = None
    del kept
    return taken


@pytest.mark.parametrize(("release", "large"), [("2.11", {"H200"}), ("2.12", {"H200", "B200"})])
def test_the_workspace_of_cublas(monkeypatch, release, large):
    monkeypatch.setenv("ULLAGE_PYTORCH", release)
    for card in CARDS:
        with ullage.virtual_gpu(card) as gpu:
            x = torch.ones(8, 8, device="cuda")
            taken = requests_of(gpu, lambda x=x: x @ x)
        assert taken[0 if taken[0] > MIB else 1] == (32 * MIB if card in large else 8 * MIB + 128 * KIB), card


def test_consumer_blackwell_has_the_large_workspace_since_2_12():
    assert named("2.11").cublas_workspace_size((12, 0)) == 8 * MIB + 128 * KIB
    assert named("2.12").cublas_workspace_size((12, 0)) == 32 * MIB


@pytest.mark.parametrize(("written", "expected"), [("4096", 4 * MIB), ("much", MIB)])
def test_the_workspace_of_cublas_lt_follows_its_variable(monkeypatch, written, expected):
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", written)
    with ullage.virtual_gpu("A100-40GB") as gpu:
        layer, x = torch.nn.Linear(8, 8, device="cuda"), torch.ones(8, 8, device="cuda")
        assert expected in requests_of(gpu, lambda: layer(x))


TILINGS = {  # rows, columns, sums of dK and dV in registers, sums of rows by the kernel
    (64, torch.float16): dict.fromkeys([*CARDS, "V100-16GB"], (64, 64, True, True)),
    (80, torch.float16): dict.fromkeys(("H200", "A100-40GB", "B200"), (128, 128, True, True))
    | {"T4": (64, 64, False, True), "RTX-4090": (128, 64, True, True), "V100-16GB": (128, 64, True, True)},
    (128, torch.float16): dict.fromkeys(("H200", "A100-40GB", "B200"), (128, 128, True, True))
    | dict.fromkeys(("T4", "RTX-4090", "RTX-5090"), (64, 64, False, True))
    | {"V100-16GB": (128, 64, True, True)},
    (256, torch.float16): dict.fromkeys(("H200", "A100-40GB", "B200"), (128, 64, False, True))
    | {"T4": (64, 64, False, True), "RTX-4090": (64, 64, False, True), "V100-16GB": (128, 64, False, False)},
    (128, torch.float32): dict.fromkeys(("H200", "A100-40GB", "B200"), (128, 64, False, False))
    | dict.fromkeys(("T4", "RTX-4090", "V100-16GB", "P100-16GB"), (64, 64, False, False)),
}


@pytest.mark.parametrize(("size", "dtype"), TILINGS)
def test_tiles_of_memory_efficient_attention(size, dtype):
    for card, expected in TILINGS[size, dtype].items():
        assert backward_tiling(size, dtype, find_gpu(card), dropout=False) == expected, card


def attention(card, dtype, heads, size, length, keys_heads=None, backend=SDPBackend.EFFICIENT_ATTENTION):
    """What the backward pass of an attention asks for."""
    with ullage.virtual_gpu(card) as gpu, sdpa_kernel(backend):
        q = torch.zeros(2, heads, length, size, device="cuda", dtype=dtype, requires_grad=True)
        k = torch.zeros(2, keys_heads or heads, length, size, device="cuda", dtype=dtype, requires_grad=True)
        out = functional.scaled_dot_product_attention(q, k, k, enable_gqa=keys_heads is not None)
        grad = torch.zeros_like(out)
        return requests_of(gpu, lambda: out.backward(grad))


def test_a_4090_sums_the_gradients_of_wide_heads_in_memory():
    heads, size, length = 4, 128, 256
    tiles = (length // 64) * (size // 64) * (16 + 64 * 64 * 4)
    sums = 2 * length * size * 4
    assert 2 * heads * (tiles + sums) in attention("RTX-4090", torch.float16, heads, size, length)
    assert 2 * heads * (tiles + sums) in attention("T4", torch.float16, heads, size, length)
    large = (length // 128) * (16 + 128 * 128 * 4)
    assert 2 * heads * large in attention("A100-40GB", torch.float16, heads, size, length)


def test_many_heads_share_fewer_parts_of_the_keys():
    heads, size, length = 64, 128, 256
    tiles = (length // 64) * (size // 64) * (16 + 64 * 64 * 4)
    assert 2 * heads * (tiles + 2 * 64 * size * 4) in attention("RTX-4090", torch.float16, heads, size, length)


def test_flash_attention_expands_grouped_heads_for_gradients():
    taken = attention("A100-40GB", torch.bfloat16, 8, 64, 128, keys_heads=2, backend=SDPBackend.FLASH_ATTENTION)
    assert taken.count(2 * 128 * 8 * 64 * 2) >= 3  # dQ, and dK and dV of every query head


@pytest.mark.parametrize("card", ["A100-40GB", "RTX-4090"])
def test_deterministic_flash_attention_sums_per_multiprocessor(card):
    torch.use_deterministic_algorithms(True)
    try:
        taken = attention(card, torch.bfloat16, 8, 64, 128, backend=SDPBackend.FLASH_ATTENTION)
    finally:
        torch.use_deterministic_algorithms(False)
    copies = -(-find_gpu(card).sms // 16)
    assert copies * 2 * 128 * 8 * 64 * 4 in taken


def convolution(card, dtype):
    with ullage.virtual_gpu(card) as gpu:
        x = torch.zeros(2, 8, 16, 16, device="cuda", dtype=dtype, requires_grad=True)
        layer = torch.nn.Conv2d(8, 8, 3, padding=1, device="cuda", dtype=dtype, bias=False)
        forward = requests_of(gpu, lambda: layer(x))
        out = layer(x)
        grad = torch.zeros_like(out)
        return forward, requests_of(gpu, lambda: out.backward(grad)), gpu.uncertainty.guessed()["of"]


def test_a_card_without_bfloat16_convolves_by_columns():
    columns, result = 8 * 9 * 16 * 16 * 2, 2 * 8 * 16 * 16 * 2
    forward, backward, asked_of_cudnn = convolution("T4", torch.bfloat16)
    assert [size for size in forward if size < MIB] == [result, columns]
    assert backward.count(columns) == 2
    assert asked_of_cudnn == 0
    assert convolution("T4", torch.float16)[2] > 0
    assert convolution("A100-40GB", torch.bfloat16)[2] > 0


def test_pascal_has_its_own_depthwise_kernels():
    def asked(card):
        with ullage.virtual_gpu(card) as gpu:
            x = torch.zeros(2, 64, 16, 16, device="cuda", dtype=torch.float16)
            torch.nn.Conv2d(64, 64, 3, padding=1, groups=64, device="cuda", dtype=torch.float16)(x)
            return gpu.uncertainty.guessed()["of"]

    assert [asked(card) for card in ("P100-16GB", "V100-16GB", "T4", "H200")] == [0, 1, 1, 1]


def test_products_of_eight_bits_need_a_card_that_has_them():
    for card, able in [("H200", True), ("RTX-4090", True), ("B200", True), ("A100-40GB", False), ("T4", False)]:
        with ullage.virtual_gpu(card):
            eight = torch.ones(64, 64, device="cuda").to(torch.float8_e4m3fn)
            one = torch.ones((), device="cuda")
            if able:
                torch._scaled_mm(eight, eight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
                continue
            with pytest.raises(RuntimeError, match=r"compute capability >= 9.0 or 8.9"):
                torch._scaled_mm(eight, eight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def recurrent(card, mode, batch, steps=64):
    tokens = batch * steps
    network = RecurrentNetwork(mode, 512, 512, 0, 1, 1, torch.float16, steps, batch, tokens, gpu=find_gpu(card))
    return network.workspace()


def test_recurrent_networks_stay_on_multiprocessors_if_allowed():
    stay, leave = recurrent("H200", LSTM, 64), recurrent("H200", LSTM, 60)
    for card in ("A100-40GB", "RTX-4090", "B200", "V100-16GB"):
        assert recurrent(card, LSTM, 64) == stay, card
    for card in ("T4", "A30", "L4", "RTX-3090"):  # Turing; too few multiprocessors; 8.6
        assert recurrent(card, LSTM, 64) < stay, card
    assert leave < stay
    assert recurrent("V100-16GB", GRU, 64) > recurrent("A100-40GB", GRU, 64)
    assert recurrent("V100-16GB", LSTM, 64, steps=8) < recurrent("A100-40GB", LSTM, 64, steps=8)


def test_a_cub_reduction_has_a_number_per_block_of_a_full_card():
    blocks = {"H200": 132 * 8, "A100-40GB": 108 * 8, "T4": 40 * 4, "RTX-4090": 128 * 6, "B200": 148 * 8}
    for card, count in blocks.items():
        expected = -(-count * 5 * 4 // 256) * 256 + 255
        assert sorting.reduce(1 << 20, 4, find_gpu(card)) == expected, card


def test_partial_sums_follow_the_number_of_multiprocessors():
    def taken(card):
        with ullage.virtual_gpu(card) as gpu:
            x = torch.zeros(1 << 24, device="cuda")
            return max(requests_of(gpu, x.sum))

    buffers = {card: taken(card) for card in CARDS}
    assert buffers["B200"] > buffers["H200"] > buffers["A100-40GB"] > buffers["T4"]


def test_a_guess_for_another_architecture_may_copy_all_tensors():
    sizes = (8, 67, 28, 28), (67, 67, 3, 3), (8, 67, 28, 28)
    problem = ConvolutionProblem(FORWARD, *sizes, (1, 1), (1, 1), (1, 1), 1, "f16", False)
    copies = all_copies(terms(problem))
    for card in ("A100-40GB", "T4", "RTX-4090", "B200"):
        spec = find_gpu(card)
        found = workspace(problem, spec.compute_capability, spec.sms)
        assert found.guessed and found.larger >= copies, card
    assert workspace(problem, (9, 0), 132).size == found.size


# What others measured: fakegpu/data/workspace_profiles.json of github.com/FanBB2333/FakeGPU at 7d5cf83, with cuDNN 9.10
# on an RTX PRO 5000 and 9.20 on an RTX 3090 Ti: batch, channels, width, type, card, bytes after rounding.
OUTSIDE = [
    (2, 64, 128, "bf16", "RTX-PRO-5000-72GB", 8462848),
    (2, 64, 128, "bf16", "RTX-3090-Ti", 8462848),
    (2, 64, 128, "f32", "RTX-PRO-5000-72GB", 16925184),
    (2, 64, 128, "f32", "RTX-3090-Ti", 8536576),
    (4, 128, 64, "f32", "RTX-PRO-5000-72GB", 17367552),
    (4, 128, 64, "f32", "RTX-3090-Ti", 8978944),
]


@pytest.mark.parametrize(("batch", "channels", "width", "kind", "card", "measured"), OUTSIDE)
def test_workspaces_that_others_measured_are_guessed(batch, channels, width, kind, card, measured):
    image = (batch, channels, width, width)
    problem = ConvolutionProblem(
        FORWARD, image, (channels, channels, 3, 3), image, (1, 1), (1, 1), (1, 1), 1, kind, False
    )
    spec = find_gpu(card)
    found = workspace(problem, spec.compute_capability, spec.sms)
    assert -(-found.larger // 512) * 512 >= measured
    assert -(-found.size // 512) * 512 == measured


def test_cards_of_one_name_have_plans_of_their_own():
    """A file that describes a card may change while this process lives."""
    card = find_gpu("A100-40GB")
    changed = replace(card, compute_capability=(7, 5), sms=40)

    def train():
        images = torch.randn(16, 64, 64, 64, device="cuda")
        torch.nn.Conv2d(64, 128, 3).cuda()(images).sum().backward()

    def peak(spec):
        return ullage.estimate(train, gpu=spec).peak_allocated

    dispatch._plans.clear()
    alone = peak(changed)
    dispatch._plans.clear()
    assert peak(card) != alone
    assert peak(changed) == alone


def test_a_card_that_says_nothing_chooses_kernels_as_an_h200():
    silent = replace(find_gpu("H200"), sms=None, max_threads_per_sm=None, compute_capability=None)

    def taken_by_a_sum(card):
        with ullage.virtual_gpu(card) as gpu:
            x = torch.empty(4096 * 4096, device="cuda")
            return requests_of(gpu, x.sum)

    assert taken_by_a_sum(silent) == taken_by_a_sum("H200")
