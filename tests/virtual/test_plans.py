"""cuDNN's plans: what the network names, and what a plan takes by its knobs. The answers are those of an H200."""

from functools import cache
from pathlib import Path

import pytest

from ullage.virtual.cudnn import network, plans, workspaces
from ullage.virtual.cudnn.formulas import (
    CandidatePlan,
    ConvolutionProblem,
    Formula,
    Lengths,
    lengths,
    needed_copies,
    terms,
)
from ullage.virtual.cudnn.network import network_inputs
from ullage.virtual.cudnn.plans import EnginePlan
from ullage_lab.judge.truth import measured_rows

ANSWERS = Path(__file__).parents[2] / "benchmarks" / "data" / "h200_fresh_answers.jsonl.xz"
H200 = (9, 0)
NOTHING = Formula(0, 0, 0, 0, 0, 0, 0)


@cache
def answers():
    return list(measured_rows(ANSWERS))


def problem(direction, source, weight, out, kind, last=False, stride=1, padding=0, groups=1):
    n = len(source) - 2
    settings = (stride,) * n, (padding,) * n, (1,) * n
    return ConvolutionProblem(direction, source, weight, out, *settings, groups, kind, last)


# What cuDNN 9.19 answered: engine, knobs, parts, what is left beside copies and partial sums, and the workspace.
TAKEN = {
    "split": (
        problem("w", (7, 14, 256, 256), (14, 14, 1, 1), (7, 14, 256, 256), "bf16"),
        49,
        {plans.TILE: 5},
        56,
        128 + 16,
        29418128,
    ),
    "sliced": (
        problem("w", (44, 32, 128, 128), (32, 32, 13, 13), (44, 32, 128, 128), "f32", padding=6),
        30,
        {plans.TILE: 5, plans.SPLIT_K_BUFFERS: 1},
        100,
        159 + 16,
        324540115,
    ),
    "sliced without buffers": (
        problem("w", (48, 600, 1, 3151), (600, 600, 1, 9), (48, 600, 1, 1576), "f16")._replace(
            stride=(1, 2), padding=(0, 4)
        ),
        10,
        {plans.TILE: 3, plans.SPLIT_K_BUFFERS: 0},
        11,
        159 + 16,
        295664695,
    ),
    "sliced, forward": (
        problem("f", (50, 1392, 9, 9), (40, 1392, 7, 7), (50, 40, 9, 9), "bf16", last=True, padding=3),
        23,
        {plans.TILE: 8, plans.SPLIT_K_BUFFERS: 0},
        0,
        159,
        1049759,
    ),
    "sliced, gradient of the data": (
        problem("d", (16, 494, 1, 1), (602, 494, 7, 7), (16, 602, 1, 1), "f16", padding=3),
        43,
        {plans.TILE: 2, plans.SPLIT_K_BUFFERS: 1},
        3,
        159 + 16,
        30375855,
    ),
    "persistent, after whole waves": (
        problem("w", (8, 2048, 9, 9, 56), (2048, 2048, 1, 1, 1), (8, 2048, 9, 9, 56), "bf16"),
        65,
        {plans.TILE: 5, plans.CLUSTER_ROWS: 3, plans.CLUSTER_COLUMNS: 1},
        32,
        159 + 4 + 16,
        298844711,
    ),
    "persistent, one wave": (
        problem("w", (68, 552, 57, 57), (4, 552, 2, 2), (68, 4, 56, 56), "bf16", last=True),
        65,
        {plans.TILE: 5, plans.CLUSTER_ROWS: 1, plans.CLUSTER_COLUMNS: 8},
        plans.AS_MANY_AS_FIT,
        159 + 16,
        5414031,
    ),
    "persistent, clusters of seven": (
        problem("f", (8, 1800, 4, 71), (9, 1800, 5, 5), (8, 9, 2, 36), "f16", stride=2, padding=2),
        62,
        {plans.TILE: 5, plans.CLUSTER_ROWS: 7, plans.CLUSTER_COLUMNS: 1},
        plans.AS_MANY_AS_FIT,
        159 + 16,
        11243831,
    ),
    "product of matrices": (
        problem("w", (128, 16, 224, 224), (16, 16, 1, 1), (128, 16, 224, 224), "bf16", last=True),
        62,
        {plans.WORKSPACE_KNOB: 2},
        plans.RESULTS * plans.MOST_UNITS + 264,
        16,
        270608,
    ),
    "product of matrices, rows in multiples of 32": (
        problem("w", (8, 592, 22, 32), (592, 592, 1, 1), (8, 592, 22, 32), "f16", last=True),
        62,
        {plans.WORKSPACE_KNOB: 2},
        plans.TALL_RESULTS * plans.MOST_UNITS + 3,
        16,
        4319504,
    ),
    "product of matrices, 131 parts where 132 were aimed at": (
        problem("w", (32, 64, 32, 32), (64, 64, 1, 1), (32, 64, 32, 32), "f32", last=True),
        62,
        {plans.WORKSPACE_KNOB: 2},
        (plans.AIMED + plans.RESULTS) * plans.MOST_UNITS + 132,
        0,
        2146560,
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_plan_takes_its_copies_and_its_partial_sums(name):
    asked, engine, knobs, parts, rest, taken = TAKEN[name]
    plan = EnginePlan(asked.direction, engine, knobs)
    cut = plans.grid(plan, lengths(asked))
    parts = plans.parts_by(plan, cut, parts)
    assert needed_copies(asked) + plans.partial_bytes(plan, cut, parts) + rest == taken


def test_a_depthwise_kernel_keeps_sums_and_copies_its_filter():
    size = (4, 40, 171, 171)
    asked = problem("w", size, (40, 1, 3, 3), size, "f32", last=True, padding=1, groups=40)
    plan = EnginePlan("w", 61, {plans.TILE: 3, plans.SPLIT_K_BUFFERS: 1})
    filter_copy, counters = 1536, 150
    assert plans.partial_bytes(plan, plans.grid(plan, lengths(asked)), 66) + filter_copy + counters == 272550


def test_an_indexed_kernel_keeps_tables_for_eight_groups():
    forward = problem("f", (16, 375, 149, 149), (375, 25, 7, 1), (16, 375, 143, 50), "f16", groups=15)
    gradient = problem("w", (74, 370, 1, 1), (360, 74, 3, 3), (74, 360, 1, 1), "f32", padding=1, groups=5)
    in_half = problem("w", (18, 1024, 47, 47), (1024, 512, 9, 9), (18, 1024, 47, 47), "f16", padding=4, groups=2)
    for asked, taken in ((forward, 5632), (gradient, 2560), (in_half, 170201120)):
        plan = EnginePlan(asked.direction, 1, {})
        assert plans.partial_bytes(plan, plans.grid(plan, lengths(asked)), 0) == taken


@pytest.mark.parametrize(("direction", "least"), [("f", 0.9), ("d", 0.9), ("w", 0.8)])
def test_the_network_knows_most_workspaces_of_unseen_networks(direction, least, monkeypatch):
    """Every hundredth answer about the networks of `h200_fresh`, none of which it was taught."""
    found = []
    for number, row in enumerate(answers()):
        asked = ConvolutionProblem.of(row["problem"])
        if asked.direction == direction and number % 100 < 3 and row.get("candidates"):
            taken = CandidatePlan(*row["candidates"][0]).workspace
            guess = workspaces.guess(asked, H200)
            found.append(abs(guess.size - taken) < 2**16)
            assert guess.guessed and guess.size <= guess.larger
    assert len(found) > 50 and sum(found) > least * len(found)


def test_the_network_speaks_for_its_own_architecture_alone(monkeypatch):
    """And for those that cuDNN was not asked about, such as a B200's."""
    asked = problem("f", (8, 64, 8, 8), (64, 64, 3, 3), (8, 64, 8, 8), "f16", padding=1)
    guesses = {capability: workspaces.guess(asked, capability) for capability in (H200, (8, 0), (10, 0))}
    monkeypatch.setattr(workspaces, "sizes_by_plans", lambda *_: [(12345, 1.0)])
    again = {capability: workspaces.guess(asked, capability) for capability in guesses}
    assert again[8, 0] == guesses[8, 0] and guesses[10, 0] == guesses[H200]
    assert again[H200].size == again[10, 0].size == 12345


def test_a_fallback_is_taken_where_cudnn_names_no_plan():
    """Large filters in two groups, in 16 bits: the fallback keeps an offset for each channel and tap."""
    size = (18, 1024, 47, 47)
    asked = problem("f", size, (1024, 512, 9, 9), size, "f16", padding=4, groups=2)
    assert abs(workspaces.guess(asked, H200).size - 331776) < 512
    in_singles = asked._replace(kind="f32")
    assert workspaces.guess(in_singles, H200).size > 2**25


def test_parts_of_a_sum_that_are_not_sure_are_named_too():
    """What cuDNN answers comes first; problems like it are split into fewer and into more parts, too."""
    asked = problem("w", (2, 32, 19, 19), (48, 32, 1, 1), (2, 48, 19, 19), "f32")
    named = workspaces.sizes_by_plans(asked, terms(asked))
    assert named[0][0] == 255760 and min(named)[0] < 255760 < max(named)[0]


@pytest.mark.parametrize(
    ("layer", "settings", "answer"),
    [
        # A stride becomes channels: odd numbers of them, a group in eight, and pixels that no tap reaches.
        (("d", (32, 9, 160, 64), (27, 9, 21, 21), (32, 27, 80, 32)), {"stride": 2, "padding": 10}, 24212496),
        (("d", (256, 70, 49, 49), (70, 70, 2, 2), (256, 70, 24, 24)), {"stride": 2}, 207698704),
        # Winograd's transforms of five taps take samples in sixteens.
        (("w", (39, 80, 13, 13), (80, 80, 5, 5), (39, 80, 13, 13)), {"padding": 2}, 25093120),
    ],
)
def test_methods_of_gradients_keep_what_cudnn_says(layer, settings, answer):
    assert answer in terms(problem(*layer, "f32", **settings)).buffers


def test_a_tabled_layer_reaches_the_network_once_under_switches(monkeypatch):
    asked = problem("f", (8, 64, 8, 8), (64, 64, 3, 3), (8, 64, 8, 8), "f32", padding=1)
    put = []
    inputs = network.network_inputs
    monkeypatch.setattr(network, "network_inputs", lambda *given: put.append(given) or inputs(*given))
    monkeypatch.setattr(workspaces, "measured", lambda *_: 4096)
    workspaces.workspace.cache_clear()
    assert workspaces.workspace(asked, H200, 132, tf32=False).guessed
    assert len(put) == 1


def test_batches_and_single_problems_have_equal_features():
    np = pytest.importorskip("numpy")
    asked = [each[0] for each in TAKEN.values() if each[0].direction == "w"]
    sizes = [lengths(each) for each in asked]
    columns = Lengths(np.array([size.row for size in sizes]).T)
    columns = network_inputs(columns, "w", lambda values: np.log2(np.maximum(values, 1)), np.minimum)
    singly = [network_inputs(size, "w") for size in sizes]
    assert np.array([np.asarray(column, float) for column in columns]).T.tolist() == np.array(singly, float).tolist()


def whole_lists():
    """The answers with all plans of a problem: those about networks with `cudnn.benchmark`."""
    rows = [row for row in answers() if len(row.get("candidates", ())) > 1]
    return [
        (ConvolutionProblem.of(row["problem"]), [CandidatePlan(*each) for each in row["candidates"]]) for row in rows
    ]


def test_an_engine_is_allowed_as_the_notes_of_its_plans_say():
    """But for plans that round their inputs, which no network was taught: PyTorch refuses them always."""
    checked = 0
    for asked, candidates in whole_lists():
        for plan in candidates:
            if plan.allowed(asked.kind):
                for tf32, deterministic in ((False, False), (True, True), (False, True)):
                    named = EnginePlan(asked.direction, plan.engine, {}).allowed(asked.kind, tf32, deterministic)
                    assert named is plan.allowed(asked.kind, tf32, deterministic), (asked, plan)
                    checked += 1
    assert checked > 10_000


@pytest.mark.parametrize(
    ("switches", "direction", "least"),
    [
        ({"deterministic": True}, "d", 0.8),  # 28 of 42 without the rule
        ({"tf32": False}, "f", 0.8),  # 56 of 124
        ({"tf32": False}, "d", 0.8),  # 40 of 106
        ({"tf32": False}, "w", 0.5),  # 41 of 118
    ],
)
def test_the_next_plan_is_guessed_where_the_first_is_ruled_out(switches, direction, least):
    found = []
    for asked, candidates in whole_lists():
        if asked.direction == direction and not candidates[0].allowed(asked.kind, **switches):
            taken = next(plan.workspace for plan in candidates if plan.allowed(asked.kind, **switches))
            found.append(abs(workspaces.guess(asked, H200, **switches).size - taken) < 2**20)
    assert len(found) > 40 and sum(found) > least * len(found)


def test_measured_workspace_holds_unless_its_plan_is_ruled_out(monkeypatch):
    """Engine 25, which adds in any order, is likely for the gradient of the first of these."""
    sizes = (128, 1, 32, 300), (256, 1, 3, 300), (128, 256, 30, 1)
    loose, firm = problem("d", *sizes, "f32"), problem("f", *sizes, "f32")
    monkeypatch.setattr(workspaces, "measured", lambda *_: 12345)
    ask = workspaces.workspace.__wrapped__
    assert ask(loose, H200, 132) == ask(firm, H200, 132, deterministic=True) == (12345, 12345, False, 0)
    instead = ask(loose, H200, 132, deterministic=True)
    assert instead.guessed and instead.size == needed_copies(loose) + 16
