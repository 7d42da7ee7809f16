"""Sparse gradients and sparse tensors: what they ask of the allocator, as an H200 with PyTorch 2.11 did."""

import pytest
import torch
from tests.virtual.recording import recorded_events
from torch import nn

import ullage


@pytest.fixture
def gpu():
    with ullage.virtual_gpu("H200") as gpu:
        gpu.libraries.need = lambda library: None
        yield gpu


def events_of(gpu, call):
    """What a call asks for and frees; what it returns is kept until then."""
    with recorded_events(gpu) as events:
        kept = call()
        found = list(events)
    del kept
    return found


def coo(indices, size, *dense):
    return torch.sparse_coo_tensor(indices.cuda(), torch.ones(indices.shape[1], *dense, device="cuda"), size)


def rows(count, step=1):
    return (torch.arange(count) * step).unsqueeze(0)


def test_gradient_of_an_embedding_is_sparse_and_adds_up(gpu):
    embedding = nn.Embedding(5000, 8, sparse=True).cuda()
    words = [torch.zeros(size, dtype=torch.int64).cuda() for size in ((1364,), (9, 20), (7,))]

    def train():
        sum(embedding(some).sum() for some in words[1:]).add(embedding(words[0]).sum()).backward()

    train()
    grad = embedding.weight.grad
    assert grad.layout is torch.sparse_coo and grad._nnz() == 1364 + 180 + 7 and not grad.is_coalesced()
    assert grad.shape == (5000, 8) and grad._values().is_cuda
    before = gpu.memory.allocator.allocated
    train()  # behind one another, without being summed
    assert embedding.weight.grad._nnz() == 2 * (1364 + 180 + 7)
    assert gpu.memory.allocator.allocated - before == 1551 * (8 + 32) // 512 * 512
    embedding.weight.grad = grad = None
    assert gpu.memory.allocator.allocated < before - 1551 * 40 + 1024


def test_gradient_of_a_bag(gpu):
    bag = nn.EmbeddingBag(1000, 100, mode="mean", sparse=True).cuda()
    words, offsets = torch.zeros(9648, dtype=torch.int64).cuda(), torch.arange(0, 9648, 36).cuda()

    def train():
        bag(words, offsets).sum().backward()
        return bag.weight.grad

    asked = [2144, 77184, 107200, 4, -3, 4, 3859200, 1072, 1072, 38592, -8, -7, -9, -2, -1, -5, -4]
    assert events_of(gpu, train) == asked
    assert bag.weight.grad._nnz() == 9648
    assert not gpu.left_out


def test_coalescing_sorts_and_sums(gpu):
    many = coo(rows(42557, step=4), (170235, 8), 8)
    nnz = 42557
    asked = [340456, 340456, 340456, 681471, -4, 1535, -5, nnz * 32, -3, -2]
    assert events_of(gpu, many.coalesce) == asked
    assert not gpu.notes  # 42,557 indices are known

    half = coo(torch.arange(7).repeat(2).unsqueeze(0), (75, 8), 8)
    assert events_of(gpu, half.coalesce)[-3:] == [7 * 32, -3, -2]
    assert half.coalesce()._nnz() == 7 and half.coalesce().is_coalesced()

    squared = coo(torch.stack([torch.arange(7), torch.arange(7)]), (50, 19))
    assert events_of(gpu, squared.coalesce) == [56, 56, 56, 1023, -4, 1535, -5, 28, 112, -3, -2, -1]


def test_unknown_indices_may_all_differ(gpu):
    unknown = torch.randint(0, 1000, (1, 500), device="cuda")
    grad = torch.sparse_coo_tensor(unknown, torch.ones(500, 4, device="cuda"), (1000, 4))
    assert grad.coalesce()._nnz() == 500
    few = torch.sparse_coo_tensor(unknown, torch.ones(500, 4, device="cuda"), (30, 4))
    assert few.coalesce()._nnz() == 30
    assert [entry["what"] for entry in gpu.assumed] == ["data-dependent shapes at their maximum"]


def test_steps_of_optimizers(gpu):
    def step(optimizer, size, words, **options):
        embedding = nn.Embedding(*size, sparse=True).cuda()
        made = optimizer(list(embedding.parameters()), **options)
        embedding(words.cuda()).backward(torch.ones(len(words), size[1], device="cuda"))
        return events_of(gpu, made.step)

    words = torch.arange(1204) % 50
    asked = [25600, 25600, 9632, 9632, 9632, 19967, -6, 1535, -7, 25600, -5, -4, 4, 25600, 400, 25600, -10, -9, -11]
    asked += [25600, 4, 25600, 400, 25600, -15, -14, -16, 25600, 25600, -19, -12, -17, -13, -18, -8, -3]
    assert step(torch.optim.SparseAdam, (50, 128), words) == asked
    assert step(torch.optim.SGD, (50, 128), words, lr=0.1) == []
    asked = [3904, 3904, 3904, 8703, -4, 1535, -5, 972, -3, -2, 972, -7, 4, 972, 1944, 972, -9, -8, 972, -12]
    words = torch.arange(488) % 243
    assert step(torch.optim.Adagrad, (50021, 1), words, lr=0.1) == [*asked, -1, -6, -10, -11]


def test_momentum_and_zeroed_gradients(gpu):
    embedding = nn.Embedding(50, 4, sparse=True).cuda()
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        embedding(torch.arange(10).cuda()).sum().backward()
        optimizer.step()
    assert optimizer.state[embedding.weight]["momentum_buffer"].layout is torch.sparse_coo


def test_products_with_dense_matrices(gpu):
    diagonal = torch.arange(300)
    sparse = coo(torch.stack([diagonal, diagonal]), (2708, 20000))
    asked = [10832, 10832, 2400, 2400, 2400, 5631, -6, 1535, -7, 1200, 4800, -5, -4, -3, 10836, 1200, -11, 1200]
    asked += [10832, 11, -14, -13, -12, -10, -8, -9, -1]
    column = torch.ones(20000, 1, device="cuda")
    assert events_of(gpu, lambda: torch.sparse.mm(sparse, column)) == asked
    csr, dense = sparse.to_sparse_csr(), torch.ones(20000, 64, device="cuda", requires_grad=True)
    assert events_of(gpu, lambda: csr @ dense.detach()) == [693248, 693248, 111, -3, -1]
    (csr @ dense).sum().backward()
    assert dense.grad.shape == (20000, 64)
    assert (csr @ dense[:, 0]).shape == (2708,) and csr.to_sparse_csc().layout is torch.sparse_csc
    assert csr.to_dense().shape == (2708, 20000) and sparse.to_dense().layout is torch.strided


@pytest.mark.filterwarnings("ignore:Sparse")
def test_products_of_two_compressed_matrices(gpu):
    """As pools of graphs do it: no more elements than there are products where the indices are known, else all."""
    ring = torch.arange(6)
    graph = coo(torch.stack([ring, (ring + 1) % 6]), (6, 6)).coalesce()
    on_cpu = torch.sparse_coo_tensor(torch.stack([ring, (ring + 1) % 6]), torch.ones(6), (6, 6)).to_sparse_csr()
    known, unknown = on_cpu.cuda(), graph.to_sparse_csr()
    for product in (known @ known, torch.sparse.mm(known, known)):
        assert (product.layout, product.shape, product._nnz()) == (torch.sparse_csr, (6, 6), 6)
        assert product.col_indices().dtype is torch.int32 and product.crow_indices().shape == (7,)
        assert product.to_sparse_coo()._nnz() == 6 and (product @ torch.ones(6, 2, device="cuda")).shape == (6, 2)
    assert not any("taken as all" in note for note in gpu.notes)
    assert (unknown.t() @ known)._nnz() == 36 and any("assumed to have all 36 elements" in note for note in gpu.notes)


def test_sparse_tensors_move_and_change_their_type(gpu):
    small = torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), torch.tensor([3.0, 4.0]), (2, 3))
    moved = small.cuda()
    assert moved.is_cuda and moved.layout is torch.sparse_coo and moved.half().dtype is torch.float16
    assert torch.equal(moved.cpu().to_dense(), small.to_dense())
    known = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).cuda()
    assert known.to_sparse()._nnz() == 2 and known.to_sparse_csr().values().shape == (2,)
    assert (moved * 2).coalesce().values().shape == (2,) and (moved + moved)._nnz() == 4
    assert torch.sparse.softmax(moved.coalesce(), 1)._nnz() == 2


def test_unsupported_sparse_operations_fail_as_on_a_gpu(gpu):
    embedding = nn.Embedding(10, 4, sparse=True).cuda()
    embedding(torch.arange(3).cuda()).sum().backward()
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_vector_norm", "SparseCPU"):  # 2.14 has one
        with pytest.raises(NotImplementedError, match="'SparseCUDA' backend"):
            nn.utils.clip_grad_norm_(embedding.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        torch.optim.Adam(embedding.parameters()).step()


def test_sparse_products_of_unknown_size_widen_the_bound(gpu):
    matrix = (torch.rand(512, 512, device="cuda") > 0.9).float().to_sparse_csr()
    matrix @ matrix
    (entry,) = [entry for entry in gpu.assumed if entry["what"].startswith("products of sparse matrices")]
    assert not entry["covered"] and entry["adds"] >= 512 * 512 * 8
