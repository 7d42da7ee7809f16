"""Kernel rules with numbers that can be worked out by hand from the kernels' sources."""

import pytest
import torch
from tests.virtual.recording import requests

import ullage
from ullage.virtual.operators import sorting
from ullage.virtual.operators.normalization import blocks_along_rows, cudnn_workspace

aten = torch.ops.aten


@pytest.fixture
def gpu():
    with ullage.virtual_gpu("H200") as gpu, torch.no_grad():
        gpu.libraries.need = lambda library: None
        yield gpu


def on_gpu(*size, dtype=torch.float32, channels_last=False):
    made = torch.empty(size, dtype=dtype, device="cuda")
    return made.contiguous(memory_format=torch.channels_last) if channels_last else made


def test_channels_last_batch_norm_keeps_results_per_block(gpu):
    source = on_gpu(32, 432, 14, 14, dtype=torch.bfloat16, channels_last=True)
    parameters = [on_gpu(432, dtype=torch.bfloat16) for _ in range(4)]
    sizes, outputs = requests(gpu, lambda: aten.native_batch_norm(source, *parameters, True, 0.1, 1e-5))
    columns, blocks = blocks_along_rows(32 * 14 * 14, 432)
    assert (columns, blocks) == (14, 25)
    assert sizes == [source.numel() * 2, 432 * 4, 432 * 4, 4 * 432 * blocks * 4, 4 * columns]
    assert [output.dtype for output in outputs] == [torch.bfloat16, torch.float32, torch.float32]


def test_cudnn_batch_norm_has_a_workspace_only_channels_last(gpu):
    parameters = [on_gpu(64) for _ in range(4)]
    for channels_last in (False, True):
        source = on_gpu(4, 64, 8, 8, channels_last=channels_last)
        sizes, _ = requests(gpu, lambda x=source: aten.cudnn_batch_norm(x, *parameters, True, 0.1, 1e-5))
        # 256 rows are 4 tiles of 64 rows and 64 channels: two sums a channel and a count, each of 4 bytes
        workspace = 1072 + 4 + 4 * (64 * 8 + 4)
        assert sizes == [source.numel() * 4, 256, 256, *([workspace] if channels_last else [])]
        assert cudnn_workspace(source.shape, source.dtype, forward=True) == workspace


def test_layer_norm_of_many_rows_sums_gradients_in_two_rounds(gpu):
    rows, columns = 100352, 64
    source, statistics, weight = on_gpu(rows, columns), on_gpu(rows, 1), on_gpu(columns)
    mask = [True, True, True]
    sizes, _ = requests(
        gpu,
        lambda: aten.native_layer_norm_backward(
            source, source, [columns], statistics, statistics, weight, weight, mask
        ),
    )
    partial = rows // 32 * columns * 4
    assert sizes[:5] == [rows * columns * 4, 256, 256, partial, partial]
    assert sizes[5] == sizes[8] == 256  # the gradients that are returned


def test_layer_norm_of_few_rows_takes_its_outputs_alone(gpu):
    source, statistics, weight = on_gpu(1000, 64), on_gpu(1000, 1), on_gpu(64)
    arguments = (source, source, [64], statistics, statistics, weight, weight, [True, True, True])
    assert requests(gpu, lambda: aten.native_layer_norm_backward(*arguments))[0] == [256000, 256, 256]


def test_a_cub_radix_sort_needs_room_for_keys_values_and_digits(gpu):
    # 8192 keys of 8 bytes: 8 passes of 256 digits counted in 8 bytes, 2 tiles of 4608 items, keys and values once more
    expected = 8 * 256 * 8 + 2 * 256 * 4 + 2 * 8192 * 8 + 256 + 255
    assert sorting.radix_sort(8192, 8, 8, 64, gpu.spec) == expected == 150015
    assert sorting.radix_sort(2304, 8, 8, 64, gpu.spec) == 1  # one block
    assert sorting.radix_sort(4096, 8, 8, 8, gpu.spec) == 256 * 8 + 256 * 4 + 256 + 255  # one pass: nothing to keep


def test_sorting_up_to_4096_elements_takes_an_index_alone(gpu):
    assert requests(gpu, lambda: torch.sort(on_gpu(8, 4096)))[0][1:] == [8 * 4096 * 4, 8 * 4096 * 8, 4096 * 8]


def test_an_embedding_gradient_of_few_indices_needs_no_sorting(gpu):
    indices = on_gpu(3072, dtype=torch.int64)
    sizes, _ = requests(gpu, lambda: aten.embedding_dense_backward(on_gpu(3072, 16), indices, 100, -1, False))
    assert sizes[1:] == [100 * 16 * 4]


def test_adding_by_index_sorts_the_indices(gpu):
    target, values = on_gpu(225, 24), on_gpu(4096, 24)
    indices = on_gpu(4096, dtype=torch.int64)
    sizes, out = requests(gpu, lambda: aten.index_put(target, [indices], values, True))
    index = 4096 * 8
    checks = [8, 1, 8, 1]  # the largest and the smallest index, compared with the size
    one_pass = 256 * 8 + 256 * 4 + 256 + 255  # 225 rows: 8 bits
    assert sizes == [225 * 24 * 4, *checks, index, index, index, index, index, one_pass]
    assert out.shape == target.shape


def test_indices_of_different_strides_are_made_contiguous(gpu):
    rows, columns = on_gpu(8, 1, dtype=torch.int64), on_gpu(1, 16, dtype=torch.int64)
    sizes, _ = requests(gpu, lambda: on_gpu(8, 16, dtype=torch.bool)[rows, columns])
    assert sizes[1:] == [8 * 16 * 8, 8 * 16 * 8, 8 * 16]


def test_a_mean_squared_error_keeps_its_unreduced_values(gpu):
    source, target = on_gpu(64, 1000), on_gpu(64, 1000)
    sizes, loss = requests(gpu, lambda: torch.nn.functional.mse_loss(source, target))
    assert sizes == [256000, 256000]
    before = gpu.memory.allocator.allocated
    del loss
    assert before - gpu.memory.allocator.allocated == 256000


def test_the_largest_of_many_numbers_is_found_in_parts(gpu):
    sizes, _ = requests(gpu, lambda: on_gpu(5_000_000).max())
    assert sizes[1:] == [4, 132 * 4 * 4, 4]  # four blocks a multiprocessor
    sizes, _ = requests(gpu, lambda: on_gpu(5_000_000).argmax())
    assert sizes[1:] == [8, 132 * 4 * 16, 4]  # each with a value and a place


def test_the_variance_keeps_welfords_four_numbers(gpu):
    sizes, _ = requests(gpu, lambda: on_gpu(1_000_000, 4).var(0))
    assert sizes[1] == 4 * 4
    assert sizes[2] % 16 == 0


def test_pooling_copies_what_lies_in_another_layout(gpu):
    grad, source = on_gpu(8, 96, 56, 56, channels_last=True), on_gpu(8, 96, 56, 56)
    window = ([3, 3], [1, 1], [1, 1], False, False, None)
    size = source.numel() * 4
    assert requests(gpu, lambda: aten.avg_pool2d_backward(grad, source, *window))[0] == [size, size]


def test_unfolding_begins_with_an_output_as_large_as_the_input(gpu):
    source = on_gpu(4, 64, 32, 32)
    sizes, columns = requests(gpu, lambda: aten.im2col(source, [3, 3], [1, 1], [0, 0], [1, 1]))
    assert sizes == [source.numel() * 4, columns.numel() * 4]
    sizes, image = requests(gpu, lambda: aten.col2im(columns, [32, 32], [3, 3], [1, 1], [0, 0], [1, 1]))
    assert sizes == [columns.numel() * 4]
    assert image.numel() < columns.numel()


def test_matrices_with_gaps_are_copied_for_cublas(gpu):
    left, right = on_gpu(16, 49, 3)[..., 0], on_gpu(49, 16)
    assert requests(gpu, lambda: left @ right)[0] == [16 * 16 * 4, 16 * 49 * 4]


def test_operators_with_a_kernel_and_a_formula_arrive_whole():
    with ullage.virtual_gpu("H200") as gpu:
        source = torch.randn(64, 512, device="cuda", requires_grad=True)
        functions = [torch.nn.functional.silu, torch.nn.functional.mish]
        if hasattr(torch.ops.aten, "_fused_rms_norm_backward"):  # since 2.9; before, it is a formula on every device
            functions.append(torch.nn.RMSNorm(512).cuda())
        for function in functions:
            out = function(source)
            sizes, _ = requests(gpu, lambda result=out: result.backward(torch.ones_like(result)))
            assert [size for size in sizes if size >= 64 * 512 * 4] in ([131072] * 2, [131072] * 3)
            source.grad = None


def test_cudnn_grid_sampling_returns_both_gradients(gpu):
    """`grid_sample` of a PyTorch with CUDA, with corners aligned and zeros beyond them."""
    source, grid = on_gpu(2, 3, 8, 8), on_gpu(2, 2, 4, 6).permute(0, 2, 3, 1)
    sizes, out = requests(gpu, lambda: aten.cudnn_grid_sampler(source, grid))
    assert out.shape == (2, 3, 4, 6) and out.is_contiguous()
    assert sizes == [2 * 4 * 6 * 2 * 4, 2 * 3 * 4 * 6 * 4]
    sizes, (first, second) = requests(
        gpu, lambda: aten.cudnn_grid_sampler_backward(source, grid, out[:, :1].expand_as(out))
    )
    assert (first.shape, second.shape) == (source.shape, grid.shape) and second.is_contiguous()
    assert sizes == [2 * 4 * 6 * 2 * 4, out.numel() * 4, source.numel() * 4, grid.numel() * 4]


def test_samples_of_distributions_are_contiguous(gpu):
    parameters = on_gpu(4, 300).t()
    for name in ("_standard_gamma", "binomial"):
        given = (parameters,) * (1 if name == "_standard_gamma" else 2)
        sizes, sample = requests(gpu, lambda name=name, given=given: getattr(torch, name)(*given))
        assert sizes == [4800] and sample.is_contiguous()
    sizes, sample = requests(gpu, lambda: torch._sample_dirichlet(parameters))
    assert sizes == [4800, 1200] and sample.shape == (300, 4)


def test_distributions_train_through_their_samples():
    with ullage.virtual_gpu("H200"):
        one, many = (torch.ones(size, device="cuda", requires_grad=True) for size in (1, 5))
        for made in (torch.distributions.Gamma(many, one), torch.distributions.Beta(many, one)):
            made.rsample().sum().backward()
        torch.distributions.Dirichlet(many).rsample().sum().backward()
        assert one.grad.shape == (1,) and many.grad.shape == (5,)
