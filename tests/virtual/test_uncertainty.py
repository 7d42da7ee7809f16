"""What an estimate says about itself: what was guessed, assumed and left out, and whether the bound covers it."""

import importlib.util

import pytest
import torch
from torch import nn

import ullage
from ullage.allocator import AllocatorConfig, RequestLog

KNOWN = "the memory of every kernel is known"


def training(make, data, read=None):
    def train():
        model = make().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(data()).float().sum()
            loss.backward()
            optimizer.step()
            if read is not None:
                read(loss)

    return train


def images(*size):
    return lambda: torch.randn(*size, device="cuda")


class Masked(nn.Module):
    """Rows by a mask: how many is data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        out = self.layer(x)
        return out[torch.nonzero(out[:, 0] > 0).squeeze(1)]


def test_where_everything_is_known_it_says_so():
    e = ullage.estimate(training(lambda: nn.Linear(32, 32), images(8, 32)), gpu="H200")
    assert KNOWN in e.certainty and "measured on H200" in e.certainty
    assert e.guessed == {"workspaces": 0, "of": 0, "bytes": 0, "of_bytes": 0}
    assert (e.assumed, e.left_out, e.upper_covers) == ([], [], True)


def test_a_workspace_guessed_without_alternative_is_reported():
    e = ullage.estimate(training(lambda: nn.Conv2d(16, 8, 3), images(3, 16, 7, 7)), gpu="H200")
    assert e.doubtful == 0  # no other size had votes
    assert e.guessed["workspaces"] == e.guessed["of"] == 2
    assert KNOWN not in e.certainty
    assert (
        "2 of 2 convolution workspaces were guessed (to be empty)" in e.certainty
        and "the bound allows for this" in e.certainty
    )


def test_a_workspace_from_the_table_is_no_guess():
    e = ullage.estimate(training(lambda: nn.Conv2d(64, 64, 3, padding=1), images(32, 64, 56, 56)), gpu="H200")
    assert e.guessed["workspaces"] == 0 < e.guessed["of"] and KNOWN in e.certainty


def test_a_guess_says_how_large_it_is():
    e = ullage.estimate(training(lambda: nn.Conv2d(67, 67, 3, padding=1), images(32, 67, 56, 56)), gpu="H200")
    assert e.guessed["bytes"] == e.guessed["of_bytes"] > 0
    assert "(100% of their bytes" in e.certainty and KNOWN not in e.certainty


def test_the_bound_leaves_room_for_a_unanimous_guess():
    with ullage.virtual_gpu("H200") as gpu:
        training(lambda: nn.Conv2d(16, 8, 3), images(3, 16, 7, 7))()
    guesses = gpu.uncertainty.guesses()
    assert guesses and all(guess.larger == guess.size and guess.surprise > 0 for guess in guesses)


def beyond_what_is_counted(layer, data):
    """What the bound adds to the largest context and the reserved memory."""
    with ullage.virtual_gpu("H200") as gpu:
        training(layer, data)()
    reserved = gpu.peak_reserved
    assert not gpu.memory.requests.possible_sizes  # no workspace has another likely size
    usual = gpu.spec.context_upper - gpu.libraries.not_loaded + gpu.libraries.beyond
    return gpu, gpu.upper - max(gpu.context, usual) - reserved


def test_bound_adds_a_large_segment_or_the_spread_of_guesses():
    known, added = beyond_what_is_counted(lambda: nn.Conv2d(64, 64, 3, padding=1), images(32, 64, 56, 56))
    assert not known.uncertainty.guesses() and added == 20 << 20
    small, added = beyond_what_is_counted(lambda: nn.Conv2d(16, 8, 3), images(3, 16, 7, 7))
    assert small.uncertainty.spread(small.peak_reserved) < added == 2 << 20
    large, added = beyond_what_is_counted(lambda: nn.Conv2d(16, 8, 3), images(513, 16, 77, 77))
    assert added == large.uncertainty.spread(large.peak_reserved) > 2 << 20


def test_the_bound_adds_a_segment_of_the_allocators_large_size():
    added = []
    for megabytes in (20, 64):
        config = AllocatorConfig.parse(f"large_segment_size_mb:{megabytes}")
        with ullage.virtual_gpu("H200", config) as gpu:
            training(lambda: nn.Linear(16, 8), images(3, 16))()
        assert not gpu.uncertainty.guesses()
        added.append(gpu.upper - gpu.peak_reserved)
    assert added[1] - added[0] == 44 << 20


def test_the_bound_adds_a_large_segment_where_a_clock_decides(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with ullage.virtual_gpu("H200") as gpu:
        training(lambda: nn.Conv2d(16, 8, 3), images(3, 16, 7, 7))()
    assert gpu.memory.requests.tried_at and gpu.uncertainty.guesses()
    assert gpu.upper - gpu.context - gpu.peak_reserved >= 20 << 20


def test_with_guesses_the_bound_tries_other_segment_addresses(monkeypatch):
    told = []
    monkeypatch.setattr(RequestLog, "largest_reserved", lambda *_, rising=False, **__: told.append(rising) or 0)
    beyond_what_is_counted(lambda: nn.Conv2d(16, 8, 3), images(3, 16, 7, 7))
    assert True in told
    told.clear()
    beyond_what_is_counted(lambda: nn.Linear(16, 8), images(3, 16))
    assert True not in told


@pytest.fixture
def without_triton(monkeypatch):
    """As where Triton is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "triton" else find(name, *more)
    )


@pytest.mark.parametrize("before", [False, True])
def test_torch_compile_is_left_out_without_triton(without_triton, before):
    model = nn.Linear(32, 32)
    compiled = torch.compile(model, backend="eager") if before else None

    def make():
        return compiled if before else torch.compile(nn.Linear(32, 32))

    e = ullage.estimate(training(make, images(8, 32)), gpu="H200")
    assert KNOWN not in e.certainty
    assert "left out: torch.compile (the eager code ran)" in e.certainty
    assert "for this, which may be too little" in e.certainty and e.upper_covers is False
    assert [entry["what"] for entry in e.left_out] == ["torch.compile (the eager code ran)"]
    assert any("pip install '.[triton]'" in note for note in e.notes)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_compiled_cuda_graphs_count_activations_once_more(without_triton, mode):
    plain = ullage.estimate(training(lambda: nn.Linear(512, 512), images(4096, 512)), gpu="H200")
    e = ullage.estimate(training(lambda: torch.compile(nn.Linear(512, 512), mode=mode), images(4096, 512)), gpu="H200")
    assert (e.peak_reserved, e.breakdown) == (plain.peak_reserved, plain.breakdown)
    twentieth = e.peak_reserved // 20
    graphs = 0 if mode.endswith("no-cudagraphs") else e.breakdown["activations"]
    assert e.upper - plain.upper == twentieth + graphs
    assert ("CUDA graphs of torch.compile" in e.certainty) is (graphs > 0)


def test_a_compiled_function_counts_when_it_is_called(without_triton):
    functions = []

    def run():
        functions.append(torch.compile(lambda x: x + 1))
        return torch.ones(8, device="cuda")

    assert KNOWN in ullage.estimate(run, gpu="H200").certainty
    e = ullage.estimate(lambda: torch.compile(mode="max-autotune")(torch.neg)(torch.ones(8, device="cuda")), gpu="H200")
    assert [entry["count"] for entry in e.left_out] == [1, 1]


def test_torch_compile_that_is_switched_off_is_no_doubt():
    e = ullage.estimate(training(lambda: torch.compile(nn.Linear(32, 32), disable=True), images(8, 32)), gpu="H200")
    assert KNOWN in e.certainty


torch.library.define("ullage_doubts::halve", "(Tensor x) -> Tensor")  # as compiled code does
torch.library.register_fake("ullage_doubts::halve", torch.empty_like)


def test_a_foreign_operator_counts_its_outputs_and_is_noted():
    def run():
        x = torch.ones(2**20, device="cuda")
        return torch.ops.ullage_doubts.halve(x)

    e = ullage.estimate(run, gpu="H200")
    assert e.peak_allocated == 2**23 and KNOWN not in e.certainty and e.upper_covers is False
    assert e.assumed[0]["what"] == "operators that take no more than their outputs" and e.assumed[0]["adds"] > 0
    assert any("halve" in note for note in e.notes)


def test_cusolver_workspaces_are_fitted_and_cufft_ones_known():
    def estimate(function, *size):
        return ullage.estimate(lambda: function(torch.ones(*size, device="cuda")), gpu="H200")

    fitted, unknown = estimate(torch.linalg.eigh, 64, 64), estimate(torch.linalg.ldl_factor, 64, 64)
    assert KNOWN not in fitted.certainty and "workspaces of cuSOLVER by fitted formulas" in fitted.assumed[0]["what"]
    assert KNOWN not in unknown.certainty and "linalg_ldl_factor" in unknown.notes[0]
    assert KNOWN in estimate(torch.fft.rfft, 64).certainty


def test_each_kind_of_doubt_adds_a_twentieth_and_printing_none():
    def estimate(read):
        return ullage.estimate(training(lambda: nn.Linear(512, 512), images(64, 512), read), gpu="H200")

    plain, printed = estimate(None), estimate(lambda loss: loss.item())
    counted = estimate(lambda loss: (int((loss > 0).sum()), loss.item(), bool(loss > 0)))
    assert printed.upper == plain.upper and counted.upper == plain.upper + plain.peak_reserved // 20
    assert plain.peak_reserved == counted.peak_reserved


def test_sparse_gradients_are_known_unless_their_indices_decide():
    def tokens():
        return torch.randint(0, 1000, (8, 16), device="cuda")

    def estimate(**options):
        return ullage.estimate(training(lambda: nn.EmbeddingBag(100_000, 64, **options), tokens), gpu="H200")

    sparse, dense = estimate(sparse=True), estimate()
    assert KNOWN in sparse.certainty and sparse.upper_covers
    assert sparse.peak_allocated < dense.peak_allocated - 100_000 * 64 * 4 * 0.9

    def train():
        embedding = nn.Embedding(1000, 64, sparse=True).cuda()
        embedding(tokens()).sum().backward()
        torch.optim.SparseAdam(list(embedding.parameters())).step()

    coalesced = ullage.estimate(train, gpu="H200")
    assert KNOWN not in coalesced.certainty and coalesced.upper_covers
    assert coalesced.assumed[0]["what"] == "data-dependent shapes at their maximum"


def test_shapes_at_their_maximum_are_counted_and_covered():
    e = ullage.estimate(training(Masked, images(8, 32)), gpu="H200")
    assert KNOWN not in e.certainty
    assert (
        "assumed: 3 data-dependent shapes at their maximum" in e.certainty
        and "the bound allows for this" in e.certainty
    )
    assert e.assumed == [{"what": "data-dependent shapes at their maximum", "count": 3, "covered": True, "adds": 0}]
    assert "make the figure a bound" in e.certainty


def test_assumed_values_are_reported():
    e = ullage.estimate(training(lambda: nn.Linear(32, 32), images(8, 32), read=lambda loss: loss.item()), gpu="H200")
    assert KNOWN not in e.certainty and "numbers that the code printed or compared" in e.certainty
    assert e.assumed[0]["covered"] is False and "the bound does not cover this" in e.certainty


def test_fitted_formulas_of_recurrent_networks_are_noted():
    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    e = ullage.estimate(training(lambda: Last(32, 64), images(20, 8, 32)), gpu="H200")
    assert KNOWN not in e.certainty and "cuDNN's recurrent networks by fitted formulas" in e.certainty
    assert e.upper_covers is False


def test_covered_and_uncovered_parts_of_the_bound():
    e = ullage.estimate(training(Masked, images(8, 32), read=lambda loss: loss.item()), gpu="H200")
    assert "the bound does not cover numbers that the code printed or compared" in e.certainty


def test_an_unmeasured_gpu_is_reported():
    e = ullage.estimate(training(lambda: nn.Linear(32, 32), images(8, 32)), gpu="A100-40GB")
    assert KNOWN not in e.certainty and "not measured on A100-40GB: rules for other GPUs" in e.certainty
    assert e.upper_covers is None and "the bound adds 5% for this" in e.certainty


def test_a_pytorch_older_than_the_measured_one_is_noted(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    monkeypatch.delenv("ULLAGE_PYTORCH", raising=False)
    e = ullage.estimate(training(lambda: nn.Linear(32, 32), images(8, 32)), gpu="H200")
    assert "PyTorch 2.8.0+cu128 is followed by the rules in its source; kernels were measured with 2.11" in e.notes
    assert "the kernels of PyTorch 2.11" in e.certainty and e.upper_covers is False
