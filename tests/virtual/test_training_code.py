"""Training code runs on the virtual GPU as it stands."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ullage


@pytest.fixture
def gpu():
    with ullage.virtual_gpu("H200") as card:
        yield card


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)).cuda()


def step(model, optimizer, x=None, loss=None):
    x = torch.randn(32, 64, device="cuda") if x is None else x
    optimizer.zero_grad()
    value = nn.functional.cross_entropy(model(x), torch.randint(0, 10, (x.shape[0],), device="cuda"))
    value.backward()
    optimizer.step()
    return value


def test_tensors_say_that_they_are_on_the_gpu(gpu):
    made = [
        torch.zeros(2, device="cuda"),
        torch.zeros(2, device="cuda:0"),
        torch.zeros(2, device=torch.device("cuda")),
        torch.zeros(2, device=0),
        torch.zeros(2).cuda(),
        torch.zeros(2).to("cuda", non_blocking=True),
        torch.zeros(2).to(0),
        torch.tensor([1.0, 2.0], device="cuda"),
        torch.as_tensor([1.0, 2.0], device="cuda"),
        torch.zeros(2).pin_memory().cuda(),
    ]
    for tensor in made:
        assert tensor.device == torch.device("cuda", 0)
        assert tensor.is_cuda and type(tensor) is torch.Tensor
        assert gpu.memory.span_of(tensor) is not None


def test_the_default_device_can_be_the_gpu(gpu):
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(3).is_cuda
        assert nn.Linear(3, 3).weight.is_cuda
    finally:
        torch.set_default_device(None)


def test_moving_a_model_keeps_its_parameters_and_their_sharing(gpu):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.cuda()
    assert model[0].weight is weight and model[1].weight is weight and weight.is_cuda
    assert optimizer.param_groups[0]["params"][0] is weight
    assert isinstance(weight, nn.Parameter)


OPTIMIZERS = [
    name
    for name in torch.optim.__all__
    if isinstance(getattr(torch.optim, name), type)
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "LBFGS")
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps(gpu, name):
    model = nn.Linear(64, 10, bias=name != "Muon").cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    for _ in range(3):
        step(model, optimizer)
    assert gpu.progress.optimizer_steps == 3


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}, {"capturable": True}, {"amsgrad": True}])
def test_adam_in_all_its_ways(gpu, options):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(2):
        step(model, optimizer)
    assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())


def test_lbfgs_keeps_its_direction_and_the_last_gradient(gpu):
    model = nn.Linear(64, 10).cuda()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x, y = torch.randn(8, 64, device="cuda"), torch.randint(0, 10, (8,), device="cuda")

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert optimizer.step(closure).is_cuda
    state = optimizer.state[model.weight]
    assert state["func_evals"] == 2
    assert state["d"].shape == state["prev_flat_grad"].shape == (650,)
    before = gpu.memory.allocator.allocated
    state.clear()
    assert before - gpu.memory.allocator.allocated == 2 * 3072  # 650 numbers, rounded up to 512 bytes


def test_gradient_accumulation_and_clipping(gpu):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for _ in range(4):
            (model(torch.randn(8, 64, device="cuda")).square().mean() / 4).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        assert norm.is_cuda
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_lowers_the_peak(reentrant):
    def run(checkpointed):
        blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)
        ).cuda()
        x = torch.randn(2048, 512, device="cuda", requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
        x.sum().backward()

    peaks = []
    for checkpointed in (False, True):
        with ullage.virtual_gpu("H200") as card:
            run(checkpointed)
        peaks.append(card.peak_allocated)
    assert peaks[1] < 0.7 * peaks[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_what_cuda_casts(gpu, dtype):
    model = mlp()
    with torch.autocast("cuda", dtype=dtype):
        x = torch.randn(16, 64, device="cuda")
        y = model(x)
        assert y.dtype == dtype
        assert torch.softmax(y, -1).dtype == torch.float32
        assert nn.functional.mse_loss(y, y).dtype == torch.float32
        before = gpu.memory.allocator.allocated
        model[0](x)
        again = gpu.memory.allocator.allocated
    assert again == before  # the weights' casts are cached, the output is gone


def test_grad_scaler_steps(gpu):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(16, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert gpu.progress.optimizer_steps == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_activations_are_not_kept(mode):
    def peak(context):
        with ullage.virtual_gpu("H200") as card:
            model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
            with context():
                model(torch.randn(4096, 1024, device="cuda"))
        return card.peak_allocated

    assert peak(mode) < peak(torch.enable_grad) - 4 * 4096 * 1024 * 4


def test_hooks_views_and_in_place_operators(gpu):
    seen = []
    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model[0].weight.register_hook(lambda grad: seen.append(grad.shape))
    x = torch.randn(32, 64, device="cuda")
    view = x.view(64, 32).t()[:, :16]
    assert gpu.memory.span_of(view) is gpu.memory.span_of(x)
    before = gpu.memory.allocator.allocated
    x.mul_(2).add_(1).clamp_(0, 1)
    x[:, 0] = 3
    assert gpu.memory.allocator.allocated == before
    model(x).sum().backward()
    assert seen == [torch.Size([32, 128]), torch.Size([128, 64])]


@pytest.mark.parametrize("cell", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_networks_train(gpu, cell, bidirectional):
    model = cell(32, 64, num_layers=2, batch_first=True, bidirectional=bidirectional, dropout=0.1).cuda()
    out, _ = model(torch.randn(4, 10, 32, device="cuda"))
    assert out.shape == (4, 10, 128 if bidirectional else 64)
    out.sum().backward()
    assert model.weight_ih_l0.grad.shape == model.weight_ih_l0.shape


def test_attention_layers_train(gpu):
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).cuda()
    layer(torch.randn(2, 16, 128, device="cuda")).sum().backward()
    attention = nn.MultiheadAttention(128, 4).cuda()
    out, weights = attention(*[torch.randn(16, 2, 128, device="cuda")] * 3)
    out.sum().backward()
    assert weights.shape == (2, 16, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_scaled_dot_product_attention_makes_no_square_matrix(dtype, masked):
    def peak(length):
        with ullage.virtual_gpu("H200") as card:
            q, k, v = (torch.randn(1, 2, length, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
            mask = torch.zeros(1, 1, 1, length, device="cuda", dtype=dtype) if masked else None
            nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
        return card.peak_allocated

    assert peak(8192) < 2.5 * peak(4096)


def test_channels_last_is_kept(gpu):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).cuda().to(memory_format=torch.channels_last)
    out = model(torch.randn(2, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    out.sum().backward()


def test_embeddings_losses_and_indexing(gpu):
    table = nn.Embedding(1000, 64, padding_idx=0).cuda()
    tokens = torch.randint(0, 1000, (8, 16), device="cuda")
    out = table(tokens)
    labels = torch.randint(0, 64, (128,), device="cuda")
    loss = nn.functional.cross_entropy(out.flatten(0, 1), labels, label_smoothing=0.1)
    loss = loss + nn.functional.kl_div(out.log_softmax(-1), out.softmax(-1), reduction="batchmean")
    loss = loss + nn.functional.binary_cross_entropy_with_logits(out, torch.zeros_like(out)) + out[tokens[0] > 5].sum()
    loss.backward()
    assert table.weight.grad.shape == (1000, 64)


def test_values_asked_for_are_plausible_and_noted(gpu):
    loss = torch.randn(10, device="cuda").mean()
    assert loss.item() == 1.0
    assert any("plausible values" in note for note in gpu.notes)


def test_values_that_came_from_the_cpu_are_known(gpu):
    lengths = torch.tensor([3, 1, 2]).cuda()
    assert lengths.tolist() == [3, 1, 2]
    assert (lengths + 1).max().item() == 4
    assert torch.nonzero(lengths > 1).shape == (2, 1)
    assert gpu.notes == []


def test_shapes_that_depend_on_data_are_the_largest_and_noted(gpu):
    x = torch.randn(100, device="cuda")
    assert x[x > 0].shape == (100,)
    assert any("100" in note for note in gpu.notes)


def test_out_of_memory_is_raised_and_can_be_survived():
    with ullage.virtual_gpu("RTX-4090") as card:
        batch, done = 1 << 16, None
        while done is None:
            try:
                x = torch.empty(batch, 1 << 20, device="cuda")
                done = batch
                del x
            except torch.cuda.OutOfMemoryError as error:
                assert "CUDA out of memory. Tried to allocate" in str(error)
                batch //= 2
        free, total = torch.cuda.mem_get_info()
        assert card.peak_reserved + card.context <= total
    assert done * (1 << 22) <= card.spec.usable < 2 * done * (1 << 22) + card.context


def test_cpu_tensors_keep_their_data(gpu):
    values = torch.arange(100000, dtype=torch.float32)
    zeros = torch.zeros(100000)
    copy_of_zeros = zeros.clone()
    zeros.fill_(2)
    assert values.sum().item() == pytest.approx(4999950000, rel=1e-5)
    assert zeros.sum().item() == 200000 and copy_of_zeros.sum().item() == 0
    assert zeros.numpy()[5] == 2 and zeros.tolist()[7] == 2
    weight = nn.Linear(512, 512).weight
    assert 0 < weight.detach().std().item() < 1


def test_deferred_values_outlive_the_virtual_gpu():
    with ullage.virtual_gpu("H200"):
        ones = torch.ones(50000)
        layer = nn.Linear(256, 256)
    assert ones.sum().item() == 50000
    assert 0.0 < layer.weight.abs().max().item() <= 256**-0.5


def test_deep_copies_take_memory_of_their_own(gpu):
    model = nn.Linear(512, 512, bias=False).cuda()
    before = gpu.memory.allocator.allocated
    ema = copy.deepcopy(model)
    assert gpu.memory.allocator.allocated == before + 512 * 512 * 4
    assert ema.weight is not model.weight and isinstance(ema.weight, nn.Parameter)


def test_nothing_leaks_after_an_exception():
    available = torch.cuda.is_available()
    with pytest.raises(ZeroDivisionError), ullage.virtual_gpu("H200"):
        torch.zeros(10, device="cuda")
        raise ZeroDivisionError
    assert torch.cuda.is_available() == available
    x = torch.randn(4, 4, requires_grad=True)
    (x * x).sum().backward()
    assert torch.allclose(x.grad, 2 * x)


def test_a_backward_pass_before_any_virtual_gpu_is_harmless():
    x = torch.randn(4, requires_grad=True)
    x.sum().backward()
    with ullage.virtual_gpu("H200"):
        y = torch.randn(4, device="cuda", requires_grad=True)
        y.sum().backward()
        assert y.grad.is_cuda


def test_nested_and_repeated_use():
    with ullage.virtual_gpu("H200") as outer:
        torch.zeros(1000, device="cuda")
        with ullage.virtual_gpu("RTX-4090") as inner:
            torch.zeros(500000, device="cuda")
            assert "4090" in torch.cuda.get_device_name()
        assert "H200" in torch.cuda.get_device_name()
    assert outer.peak_allocated == 4096 and inner.peak_allocated == 2000384


def test_a_second_thread_is_refused():
    import threading

    errors = []

    def use():
        try:
            with ullage.virtual_gpu("H200"):
                pass
        except ullage.UllageError as error:
            errors.append(str(error))

    with ullage.virtual_gpu("H200"):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "one thread of a process" in errors[0]


def test_mixed_cpu_and_gpu_tensors_are_refused_as_in_pytorch(gpu):
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device="cuda") + torch.zeros(3)


def test_a_cpu_tensor_can_be_the_template_of_a_gpu_tensor(gpu):
    pattern = torch.ones(3, 4)
    made = [
        torch.zeros_like(pattern, device="cuda"),
        torch.randn_like(pattern, device="cuda"),
        pattern.new_full((3, 4), 2.0, device="cuda"),
    ]
    assert all(tensor.is_cuda and tensor.shape == (3, 4) for tensor in made)
    assert torch.cuda.memory_allocated() == 3 * 512


def test_a_second_gpu_is_refused_as_pytorch_does(gpu):
    for make in (lambda: torch.zeros(3, device="cuda:1"), lambda: torch.zeros(3).to("cuda:1")):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            make()


def test_an_operator_without_shape_inference_is_named(gpu):
    torch.library.define("ullage_test::unknown", "(Tensor x) -> Tensor")
    with pytest.raises((ullage.UllageError, NotImplementedError), match="ullage_test"):
        torch.ops.ullage_test.unknown(torch.zeros(3, device="cuda"))


def test_a_loop_over_unknown_flags_ends_after_its_rounds():
    with ullage.virtual_gpu("H200"):
        finished = torch.zeros(3, dtype=torch.bool, device="cuda")
        rounds = 0
        while not bool(finished.long().min() == 1):
            rounds += 1
            found = torch.rand(3, device="cuda") > 2
            limit = torch.full((3,), rounds >= 5, dtype=torch.bool, device="cuda")
            finished = finished | found | limit
            assert rounds <= 5
        assert rounds == 5
        assert ((torch.rand(3, device="cuda") > 0) & ~finished).tolist() == [False] * 3


@pytest.mark.parametrize("switch", ["benchmark", "deterministic"])
def test_switches_that_change_cudnns_choice_are_noted(switch):
    with torch.backends.cudnn.flags(enabled=True, **{switch: True}), ullage.virtual_gpu("H200") as gpu:
        torch.nn.Conv2d(3, 8, 3, device="cuda")(torch.randn(1, 3, 8, 8, device="cuda"))
    assert any(f"cudnn.{switch} is on" in note for note in gpu.notes)


def test_the_context_has_the_libraries_that_were_used():
    def context(*operators):
        with ullage.virtual_gpu("H200") as gpu:
            for operator in operators:
                operator()
        return gpu.context >> 20

    def multiply():
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")

    def convolve():
        torch.nn.functional.conv2d(torch.ones(1, 1, 8, 8, device="cuda"), torch.ones(1, 1, 3, 3, device="cuda"))

    assert (context(), context(multiply), context(convolve), context(multiply, convolve)) == (614, 742, 632, 760)


def test_checkpoints_load_with_cuda_as_the_default_device(tmp_path):
    with ullage.virtual_gpu("T4"), torch.device("cuda"):
        model = nn.Linear(4, 4)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=False))
        assert model.weight.is_cuda


def test_a_layer_recomputed_in_autocast_drops_its_weight_casts():
    """A GPU's backward pass runs in a thread of its own, where autocast is entered and left with each layer."""
    width = 1024

    def casts(backward_inside):
        with ullage.virtual_gpu("H200") as gpu:
            layers = [torch.nn.Linear(width, width, bias=False, device="cuda") for _ in range(3)]
            x = torch.zeros(4, width, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16):
                for layer in layers:
                    x = checkpoint(layer, x, use_reentrant=False)
                if backward_inside:
                    x.sum().backward()
            if not backward_inside:
                x.sum().backward()
            return gpu.memory.requests.sizes().count(2 * width * width)

    # The first one finds those of the forward pass.
    assert casts(backward_inside=True) == casts(backward_inside=False) - 1


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}])
def test_backward_over_weights_changed_by_a_step_is_refused(options):
    with ullage.virtual_gpu("H200"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters(), **options)
        out = model(torch.randn(4, 8, device="cuda"))
        out.sum().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.square().sum().backward()
