"""Small tensors keep their values on the virtual GPU, as far as these follow from what the CPU knew."""

import copy

import pytest
import torch

import ullage


@pytest.fixture
def gpu():
    with ullage.virtual_gpu("H200") as card:
        yield card


def as_integrators_check(t):
    """What a solver of differential equations asks of its times."""
    assert t.dim() == 1 and t.is_floating_point()
    assert (t[1:] > t[:-1]).all() or (t[1:] < t[:-1]).all(), "t must be strictly increasing or decreasing"
    return [float(moment) for moment in t]


# Each is computed on the CPU and on the virtual GPU; both must have the same values.
KNOWN = {
    "two times": lambda device: as_integrators_check(torch.tensor([0.0, 1.0]).to(device)),
    "times from the CPU": lambda device: as_integrators_check(torch.linspace(0, 1, 25).to(device)),
    "times backwards": lambda device: as_integrators_check(-torch.linspace(0.0, 1.0, 9, device=device)),
    "a schedule": lambda device: (
        torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).to(device)[[0, 500, 999]].sqrt().tolist()
    ),
    "single numbers": lambda device: int(torch.tensor([7.0, 9.0]).to(device)[1]),
    "rows": lambda device: [row.tolist() for row in torch.arange(6).view(2, 3).to(device)],
    "several results": lambda device: [part.tolist() for part in torch.tensor([3, 1, 2]).to(device).sort()],
    "pieces": lambda device: [part.tolist() for part in torch.arange(5).to(device).split(2)],
    "an outcome of cat and stack": lambda device: torch.cat(
        [torch.stack([torch.ones(2, device=device), torch.zeros(2, device=device)]).flatten()] * 2
    ).tolist(),
    "a mask written in part": lambda device: written(torch.zeros(4, 4, dtype=torch.bool, device=device)).tolist(),
    "empty memory filled": lambda device: torch.empty(3, device=device).fill_(2.5).tolist(),
    "a view of what was written": lambda device: counted(torch.zeros(3, dtype=torch.int64, device=device)),
    "nonzero": lambda device: torch.nonzero(torch.tensor([0, 1, 0, 1]).to(device)).tolist(),
    "a masked choice": lambda device: (
        torch.arange(4.0).to(device)[torch.tensor([True, False, True, True]).to(device)].mul(2).tolist()
    ),
    "masked_select": lambda device: (
        torch.arange(4).to(device).masked_select(torch.tensor([True, False] * 2).to(device)).tolist()
    ),
    "unique": lambda device: [
        part.tolist() for part in torch.tensor([5, 3, 5, 1]).to(device).unique(return_inverse=True, return_counts=True)
    ],
    "bincount": lambda device: torch.bincount(torch.tensor([1, 4, 1]).to(device)).tolist(),
    "repeat_interleave": lambda device: torch.repeat_interleave(
        torch.arange(3).to(device), torch.tensor([2, 0, 1]).to(device)
    ).tolist(),
    "equal": lambda device: torch.equal(torch.tensor([1.0]).to(device), torch.tensor([2.0]).to(device)),
    "a copy": lambda device: copy.deepcopy(torch.tensor([1.0, 2.0]).to(device)).tolist(),
    "out=": lambda device: torch.add(torch.ones(2).to(device), 1, out=torch.zeros(2, device=device)).shape,
    "none at all": lambda device: bool(torch.zeros(0, device=device).any()),
    "half": lambda device: torch.tensor([0.5, 2.0]).to(device).half().float().tolist(),
}


def written(mask):
    mask[1:3, :2] = True
    mask[0].fill_(True)
    mask[3, 3] = mask[1, 1]
    return mask


def counted(steps):
    first, once = steps[0], steps.view(1, 3)
    first += 5
    torch._foreach_add_([steps], 1)
    return once.tolist()


@pytest.mark.parametrize("name", KNOWN)
def test_results_of_known_values_are_known(gpu, name):
    assert KNOWN[name]("cuda") == KNOWN[name]("cpu")
    assert not gpu.noted, "nothing was assumed"


UNKNOWN = {
    "drawn at random": lambda x: torch.rand(3, device="cuda"),
    "changed by something unknown": lambda x: x.add_(torch.rand(3, device="cuda")),
    "changed through a view": lambda x: (x[1:].normal_(), x)[1],
    "changed by out=": lambda x: torch.rand(3, device="cuda", out=x),
    "drawn into": lambda x: x.uniform_(),
    "a parameter's": lambda x: torch.nn.Linear(3, 3).cuda().bias,
    "never written": lambda x: torch.empty(3, device="cuda"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_results_are_unknown(gpu, name):
    changed = UNKNOWN[name](torch.zeros(3, device="cuda"))
    assert gpu.values.known(changed) is None
    changed.tolist()
    assert gpu.noted, "something was assumed"


def test_unknown_numbers_are_finite(gpu):
    loss = torch.rand(4, device="cuda").mean()
    assert torch.isfinite(loss) and torch.isfinite(torch.rand(4, device="cuda")).all()
    assert not loss.isnan() and not loss.isinf()
    assert not torch.isfinite(torch.tensor([1.0, float("inf")]).cuda()).all(), "what is known counts"


def test_read_values_are_copies(gpu):
    on_gpu = torch.tensor([1.0, 2.0]).cuda()
    read = on_gpu.cpu()
    read.zero_()
    assert on_gpu.tolist() == [1.0, 2.0]


def test_a_large_view_of_one_number_is_not_computed(gpu):
    assert gpu.values.known(torch.ones(1, device="cuda").expand(1 << 40).sum(dtype=torch.float32)) is None


def test_a_number_without_data_counts_as_one_in_comparisons(gpu):
    x = torch.rand((), device="cuda")
    assert x.item() == 1.0
    assert (x <= 1) and (x > 0.5) and (x == x) and not (x < 1) and not (torch.zeros((), device="cuda") > x)
    assert not (x > -1) and not (x < -1), "nobody knows its sign"
    assert torch.isfinite(x) and not torch.isnan(x) and not torch.isinf(x)


def test_all_numbers_without_data_are_compared_as_ones(gpu):
    """Libraries ask so whether their arguments are valid, in functions of their own."""
    sigma = torch.rand(64, 2, device="cuda") + 0.1
    flags = sigma > 0
    flags[torch.rand(64, device="cuda") > 0.5] = False
    asked = [sigma > 0, sigma.view(-1) <= 1, sigma < 1e-3, sigma > -5, sigma == 1, flags]
    answers = [bool(each.all()) for each in asked]  # an assertion would get the answer that it wants
    assert answers == [True, True, False, False, False, False]


def test_a_step_of_unknown_size_goes_forward(gpu):
    start, step = torch.tensor(3.5).cuda(), torch.rand((), device="cuda")
    exec("assert start + step > start, 'underflow'\nassert not (start + step <= start)", {"start": start, "step": step})
    assert gpu.noted, "something was assumed"


def test_a_loop_over_numbers_without_data_ends(gpu):
    now, end, rounds = torch.zeros((), device="cuda"), torch.tensor(25.0).cuda(), 0
    while end > now:
        now = now + torch.rand((), device="cuda")
        rounds += 1
        assert rounds < 100
    assert rounds == 1


def test_a_loop_that_waits_for_samples_to_be_accepted_ends(gpu):
    """As `torch.distributions.VonMises` draws them; one that waits for nothing gets no true flag."""
    done = torch.zeros(8, dtype=torch.bool, device="cuda")
    while not done.all():
        done = done | (torch.rand(8, device="cuda") > torch.rand(8, device="cuda"))
    assert not any(bool((torch.rand(8, device="cuda") > torch.rand(8, device="cuda")).any()) for _ in range(20))


def test_a_mask_that_is_read_selects_all_and_flags_are_false(gpu):
    x = torch.rand(2, 5, device="cuda")
    rows, mask = x.cpu(), (x > 0.5).cpu()
    assert [len(row[chosen]) for row, chosen in zip(rows, mask, strict=True)] == [5, 5]
    assert not (x.sum(1) > 3).cpu().any() and not (x.sum(1, keepdim=True) > 3).cpu().any()


def test_a_gradient_that_there_is_not_has_no_values(gpu):
    norm = torch.nn.BatchNorm1d(4, affine=False).cuda()
    x = torch.rand(8, 4).cuda().requires_grad_()
    norm(x).backward(torch.ones(8, 4).cuda())
    assert x.grad.shape == (8, 4)
    nothing = torch.rand(0).cuda().requires_grad_()
    torch.nn.functional.batch_norm(nothing, None, None, training=True).sum().backward()
    assert nothing.grad.shape == (0,)


def test_a_loop_until_a_small_loss_runs_some_steps(gpu):
    net = torch.nn.Linear(8, 1, device="cuda")
    optimizer = torch.optim.Adam(net.parameters())
    loss = torch.tensor(float("inf"))
    while loss > 0.01:
        loss = net(torch.rand(4, 8, device="cuda")).square().mean()
        if torch.isnan(loss):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert gpu.progress.optimizer_steps < 100
    assert gpu.progress.optimizer_steps > 30


def checked(x, fine):
    if not fine:
        raise ValueError(f"not fine: {x}")
    return "fine"


def refused(x, bad):
    if bad:
        raise ValueError(f"bad: {x}")
    return "fine"


def asserted(x, fine):
    """Compiled here, because pytest rewrites the assertions of a test file."""
    code = "assert x.dim() == 1 and fine, 'not fine'\nassert bool(fine), f'not fine: {x}'\nassert not ~fine"
    exec(compile(code, "script.py", "exec"), {"x": x, "fine": fine})
    return "fine"


def chosen(x, flag):
    return "yes" if flag else "no"


@pytest.mark.parametrize(("code", "answer"), [(checked, "fine"), (refused, "fine"), (asserted, "fine"), (chosen, "no")])
def test_an_unknown_flag_takes_the_branch_that_does_not_raise(gpu, code, answer):
    x = torch.rand(1 << 20, device="cuda")
    assert code(x, (x > 0).all()) == answer
    assert gpu.noted, "something was assumed"


# Masks: zeros into which ones are written at places that nobody knows.


def sampled(count, size=100_000):
    """A mask as detectors make it: some of the places, drawn at random."""
    mask = torch.zeros(size, dtype=torch.uint8, device="cuda")
    mask[torch.randperm(size, device="cuda")[:count]] = 1
    return mask


MASKS = {
    "of a large mask": (lambda: torch.where(sampled(128))[0], 128),
    "of a small one": (lambda: sampled(5, size=40).nonzero(), 5),
    "of either": (lambda: torch.where(sampled(128) | sampled(384))[0], 512),
    "of several, one after the other": (lambda: torch.where(torch.cat([sampled(100), sampled(20, 50)]))[0], 120),
    "of flags": (lambda: torch.rand(100_000, device="cuda")[sampled(128).bool()], 128),
    "of a part": (lambda: sampled(128)[:50].nonzero(), 50),
    "of rows": (lambda: rows(torch.zeros(300, 400, device="cuda")).nonzero(), 3 * 400),
    "of a mask that is emptied": (lambda: torch.where(sampled(128).zero_())[0], 0),
    "selected": (lambda: torch.rand(100_000, device="cuda").masked_select(sampled(9).bool()), 9),
}


def rows(made):
    made[torch.randperm(300, device="cuda")[:3]] = 1
    return made


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_has_at_most_as_many_places_as_were_written(gpu, name):
    make, count = MASKS[name]
    assert len(make()) == count


ALL = {
    "a part is filled": lambda mask: mask[:10].fill_(1),
    "something is added": lambda mask: mask.add_(1),
    "something is copied": lambda mask: mask.copy_(torch.rand(100_000, device="cuda") > 0.5),
    "a part is copied": lambda mask: mask[:70_000].copy_(torch.rand(70_000, device="cuda") > 0.5),
    "a result is written": lambda mask: torch.bitwise_not(mask, out=mask),
    "a mask is filled": lambda mask: mask.masked_fill_(torch.rand(100_000, device="cuda") > 0.5, 1),
}


@pytest.mark.parametrize("name", ALL)
def test_a_mask_that_anything_else_wrote_to_may_be_full(gpu, name):
    mask = sampled(128)
    ALL[name](mask)
    assert len(mask.nonzero()) == 100_000


def test_an_expanded_mask_counts_every_element(gpu):
    assert len(sampled(2, 300).expand(400, 300).nonzero()) == 400 * 300


def test_a_script_may_know_how_many_elements_it_selects(gpu):
    x, mask = torch.randn(8, 3, 10, 10, device="cuda"), torch.rand(8, 3, 10, 10, device="cuda") > 0.5
    assert torch.masked_select(x, mask).view(8, 3, 6, 6).shape == (8, 3, 6, 6)
    assert gpu.assumed_sizes.saved == 8 * 3 * (100 - 36) * (4 + 4 * 8), "the elements, and where they are"
    assert x[mask].view(8, -1, 7).shape == (8, 42, 7), "as many as there may be, in whole rows"
    rows = x.flatten(1)[mask[:, 0, 0, 0]]
    assert rows.view(4, 2, 150).shape == (4, 2, 150)
    with pytest.raises(RuntimeError, match="invalid"):
        x.flatten().view(8, 3, 6, 6)
    with pytest.raises(RuntimeError, match="invalid"):
        x[mask].view(8, 3, 11, 11)


def test_experts_of_a_router_get_equal_shares_of_the_tokens(gpu):
    scores = torch.randn(30, 4, device="cuda").softmax(-1)
    chosen = scores.topk(2).indices
    for expert in range(4):
        mask = chosen == expert
        assert mask.any() and len(mask.any(-1).nonzero()) == 15
    assert scores.topk(3, dim=0).indices.cpu().sort(0).values[:, :2].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert any("in turn, equally" in note for note in gpu.notes)


def test_choices_of_known_scores_are_followed(gpu):
    assert torch.tensor([0.1, 0.9, 0.4]).cuda().topk(2).indices.tolist() == [1, 2]
    assert not any("in turn, equally" in note for note in gpu.notes)


def test_parts_of_a_text_on_the_gpu_are_known(gpu):
    text = torch.arange(200_000) % 1000
    on_gpu = text.cuda()
    assert on_gpu[70_000:70_005].tolist() == [0, 1, 2, 3, 4]
    assert on_gpu[torch.tensor([5, 199_999]).cuda()].tolist() == [5, 999]
    assert on_gpu.view(20, -1).t().contiguous()[3].tolist() == text.view(20, -1)[:, 3].tolist()
    assert torch.equal(on_gpu.cpu(), text)
    on_gpu += torch.randn(200_000, device="cuda").long()
    assert len((on_gpu[:10] == 3).nonzero()) == 10  # no longer known: each may be


def test_masks_of_drawn_numbers_share_what_there_is(gpu):
    shifts = torch.randint(-2, 3, (1000,), device="cuda")
    counts = [len((shifts == shift).nonzero()) for shift in range(-3, 4)]
    assert sum(counts) == 1000 and counts[0] == counts[-1] == 0 and min(counts[1:-1]) > 100


@pytest.mark.parametrize("targets", ["drawn on the GPU", "of a text on the GPU", "without data"])
def test_an_adaptive_softmax_splits_its_targets(gpu, targets):
    loss = torch.nn.AdaptiveLogSoftmaxWithLoss(64, 1000, [100, 400]).cuda()
    if targets == "drawn on the GPU":
        target = torch.randint(1000, (700,), device="cuda")
    elif targets == "of a text on the GPU":
        target = torch.randint(0, 1000, (100_000,)).cuda()[:700]
    else:
        target = torch.randn(700, 1000, device="cuda").argmax(1)
    rows = []
    for tail in loss.tail:
        tail.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    loss(torch.randn(700, 64, device="cuda"), target).loss.backward()
    assert len(rows) == 2 and 150 < rows[0] < 280 and 350 < rows[1] < 500


def test_a_mask_of_pairs_is_known(gpu):
    same = torch.eye(512, dtype=torch.bool).to("cuda")
    similarity = torch.randn(512, 512, device="cuda")
    assert similarity[~same].view(512, -1).shape == (512, 511)
    assert not any("taken as all" in note for note in gpu.notes)


@pytest.mark.parametrize("rows", [1, 3])
def test_probabilities_without_data_pass_distribution_checks(gpu, rows):
    odds = torch.randn(rows, 2, device="cuda").softmax(-1)
    assert torch.distributions.Categorical(odds, validate_args=True).sample().shape == (rows,)
    with pytest.raises(ValueError, match="Simplex"):
        torch.distributions.Categorical(torch.tensor([[0.5, -0.2]]).cuda(), validate_args=True)
