"""Peaks that one can count by hand, to the byte. Sizes are chosen so that rounding to 512 bytes changes nothing."""

import pytest
import torch

import ullage

WEIGHT = 512 * 512 * 4
ROWS = 256 * 512 * 4
CUBLAS = 32 * 2**20  # one workspace a thread that multiplies matrices, on Hopper
NUMBER = 512  # the smallest block


def one_step(optimizer_class, steps=1, set_to_none=True, **options):
    """A linear layer without bias, its gradient given from outside: three products a step."""

    def train():
        model = torch.nn.Linear(512, 512, bias=False).cuda()
        optimizer = optimizer_class(model.parameters(), **options)
        x = torch.randn(256, 512, device="cuda")
        gradient = torch.ones(256, 512, device="cuda")
        for _ in range(steps):
            y = model(x)
            y.backward(gradient)
            del y
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    return train


def peak(train):
    with ullage.virtual_gpu("H200") as gpu:
        train()
    return gpu.peak_allocated


def test_sgd_holds_its_tensors_and_two_workspaces():
    # The peak is inside the backward pass: weight, x, the given gradient, y, the weight's gradient, two workspaces.
    assert peak(one_step(torch.optim.SGD, lr=0.1)) == 2 * WEIGHT + 3 * ROWS + 2 * CUBLAS


def test_kept_gradients_raise_the_peak_of_sgd_at_the_next_step():
    # With set_to_none=False the old gradient stays, and the new one is added to it from a tensor of its own.
    train = one_step(torch.optim.SGD, steps=2, set_to_none=False, lr=0.1)
    assert peak(train) == 3 * WEIGHT + 3 * ROWS + 2 * CUBLAS
    assert peak(one_step(torch.optim.SGD, steps=2, lr=0.1)) == 2 * WEIGHT + 3 * ROWS + 2 * CUBLAS


def test_momentum_keeps_a_clone_of_the_gradient():
    train = one_step(torch.optim.SGD, steps=1, lr=0.1, momentum=0.9)
    # The peak moves to the optimizer's step: weight, gradient, momentum, x and the given gradient.
    assert peak(train) == max(2 * WEIGHT + 3 * ROWS, 3 * WEIGHT + 2 * ROWS) + 2 * CUBLAS


def test_adam_before_and_after_its_first_step():
    # First step: in the optimizer's step, weight, gradient, two moments, and the square root that foreach makes.
    first = 2 * WEIGHT + 2 * WEIGHT + WEIGHT + 2 * ROWS + 2 * CUBLAS
    assert peak(one_step(torch.optim.Adam, steps=1)) == first
    assert peak(one_step(torch.optim.Adam, steps=3)) == first


def test_fused_adam_has_its_step_on_the_gpu_and_no_square_root():
    expected = 2 * WEIGHT + 2 * WEIGHT + NUMBER + 2 * ROWS + 2 * CUBLAS
    assert peak(one_step(torch.optim.Adam, fused=True)) == expected


def test_a_bias_brings_the_workspace_of_cublaslt():
    def train():
        model = torch.nn.Linear(512, 512).cuda()
        with torch.no_grad():
            model(torch.randn(256, 512, device="cuda"))

    # weight, bias (2,048 bytes), x, y, one workspace of cuBLAS and 1 MiB of cuBLASLt
    assert peak(train) == WEIGHT + 2048 + 2 * ROWS + CUBLAS + 2**20


@pytest.mark.parametrize("gpu", ["A100-40GB", "RTX-4090", "V100-32GB"])
def test_older_gpus_take_a_smaller_workspace(gpu):
    with ullage.virtual_gpu(gpu) as card:
        torch.mm(torch.empty(512, 512, device="cuda"), torch.empty(512, 512, device="cuda"))
    assert card.peak_allocated == 3 * WEIGHT + 8_519_680


def test_reserved_memory_is_in_segments():
    with ullage.virtual_gpu("H200") as gpu:
        small = torch.empty(1000, device="cuda")
        large = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
        huge = torch.empty(33 * 2**20 + 1, dtype=torch.uint8, device="cuda")
    del small, large, huge
    # The rest of the 34 MiB segment is not larger than 1 MiB, so it is not split off.
    assert gpu.peak_allocated == 4096 + 3 * 2**20 + 34 * 2**20
    assert gpu.peak_reserved == (2 + 20 + 34) * 2**20
    assert gpu.process_memory == gpu.peak_reserved + gpu.context


def test_a_product_into_a_given_tensor_needs_only_the_workspace():
    def train():
        a, out = torch.ones(512, 512, device="cuda"), torch.empty(512, 512, device="cuda")
        torch.mm(a, a, out=out)
        torch.addmm(out, a, a, out=out)

    assert peak(train) == 2 * WEIGHT + CUBLAS


@pytest.mark.skipif("dtype" not in torch.ops.aten.addmm.overloads(), reason="PyTorch before 2.8 has no out_dtype")
def test_a_low_precision_product_is_summed_in_the_set_type():
    def train():
        a = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
        total = torch.addmm(torch.zeros(512, 512, device="cuda"), a, a, out_dtype=torch.float32)
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
        assert total.dtype is torch.float32
        assert torch.mm(a, a, out_dtype=torch.float32).dtype is torch.float32

    assert peak(train) == WEIGHT // 2 + 2 * WEIGHT + CUBLAS


@pytest.mark.parametrize("product", ["dot", "vdot", "addmv"])
def test_products_of_vectors_bring_the_workspace_of_cublas(product):
    with ullage.virtual_gpu("H200"):
        vector = torch.zeros(128, device="cuda")
        if product == "addmv":
            torch.addmv(vector, torch.zeros(128, 128, device="cuda"), vector)
        else:
            getattr(torch, product)(vector, vector)
        assert torch.cuda.memory_allocated() == 512 + CUBLAS
