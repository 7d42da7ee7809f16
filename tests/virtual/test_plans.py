"""cuDNN's plans: what the network names, and what a plan takes by its knobs. The answers are those of an H200."""

from pathlib import Path

import pytest

from ullage.research.ranking.truth import measured_rows
from ullage.virtual.kernels.cudnn import plans, workspaces
from ullage.virtual.kernels.cudnn.formulas import (
    CandidatePlan,
    ConvolutionProblem,
    Formula,
    needed_copies,
    terms,
)
from ullage.virtual.kernels.cudnn.plans import EnginePlan

ANSWERS = Path(__file__).parents[2] / "benchmarks" / "data" / "h200_fresh_answers.jsonl.xz"
H200 = (9, 0)
NOTHING = Formula(0, 0, 0, 0, 0, 0, 0)


def problem(direction, source, weight, out, kind, last=False, stride=1, padding=0):
    n = len(source) - 2
    settings = (stride,) * n, (padding,) * n, (1,) * n
    return ConvolutionProblem(direction, source, weight, out, *settings, 1, kind, last)


# What cuDNN 9.19 answered: engine, knobs, parts, what is left beside copies and partial sums, and the workspace.
TAKEN = {
    "split": (
        problem("w", (7, 14, 256, 256), (14, 14, 1, 1), (7, 14, 256, 256), "bf16"),
        49, {plans.TILE: 5}, 56, 128 + 16, 29418128,
    ),
    "sliced": (
        problem("w", (44, 32, 128, 128), (32, 32, 13, 13), (44, 32, 128, 128), "f32", padding=6),
        30, {plans.TILE: 5, plans.SPLIT_K_BUFFERS: 1}, 101, 159 + 16, 324540115,
    ),
    "sliced without buffers": (
        problem("w", (48, 600, 1, 3151), (600, 600, 1, 9), (48, 600, 1, 1576), "f16"),
        10, {plans.TILE: 3, plans.SPLIT_K_BUFFERS: 0}, 11, 159 + 16, 295664695,
    ),
    "persistent, after whole waves": (
        problem("w", (8, 2048, 9, 9, 56), (2048, 2048, 1, 1, 1), (8, 2048, 9, 9, 56), "bf16"),
        65, {plans.TILE: 5, plans.CLUSTER_ROWS: 3, plans.CLUSTER_COLUMNS: 1}, 32, 159 + 4 + 16, 298844711,
    ),
    "persistent, one wave": (
        problem("w", (68, 552, 57, 57), (4, 552, 2, 2), (68, 4, 56, 56), "bf16", last=True),
        65, {plans.TILE: 5, plans.CLUSTER_ROWS: 1, plans.CLUSTER_COLUMNS: 8}, plans.AS_MANY_AS_FIT, 159 + 16, 5414031,
    ),
    "persistent, clusters of seven": (
        problem("f", (8, 1800, 4, 71), (9, 1800, 5, 5), (8, 9, 2, 36), "f16", stride=2, padding=2),
        62, {plans.TILE: 5, plans.CLUSTER_ROWS: 7, plans.CLUSTER_COLUMNS: 1}, plans.AS_MANY_AS_FIT, 159 + 16, 11243831,
    ),
    "product of matrices": (
        problem("w", (128, 16, 224, 224), (16, 16, 1, 1), (128, 16, 224, 224), "bf16", last=True),
        62, {plans.WORKSPACE_KNOB: 2}, 264, 256 + 16, 270608,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_plan_takes_its_copies_and_its_partial_sums(name):
    asked, engine, knobs, parts, rest, taken = TAKEN[name]
    plan = EnginePlan(asked.direction, engine, knobs)
    cut = plans.grid(plan, plans.lengths(asked))
    parts = plans.parts_by(plan, cut, parts)
    assert needed_copies(asked) + plans.partial_bytes(plan, cut, parts) + rest == taken


@pytest.mark.parametrize(("direction", "least"), [("f", 0.9), ("d", 0.9), ("w", 0.8)])
def test_the_network_names_most_workspaces_of_networks_that_it_has_not_seen(direction, least, monkeypatch):
    """Every hundredth answer about the networks of benchmarks/fresh_networks.py, none of which it was taught."""
    found = []
    for number, row in enumerate(measured_rows(ANSWERS)):
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
    monkeypatch.setattr(workspaces, "sizes_by_plans", lambda problem, parts: [(12345, 1.0)])
    again = {capability: workspaces.guess(asked, capability) for capability in guesses}
    assert again[8, 0] == guesses[8, 0] and guesses[10, 0] == guesses[H200]
    assert again[H200].size == again[10, 0].size == 12345


def test_parts_of_a_sum_that_are_not_sure_are_named_too():
    """cuDNN splits this gradient into three parts; problems like it are split into one or six, too."""
    asked = problem("w", (2, 405, 28, 28), (222, 405, 7, 7), (2, 222, 28, 28), "bf16", padding=3)
    named = workspaces.sizes_by_plans(asked, terms(asked))
    assert named[0][0] == 136328336 and min(named)[0] < 136328336 < max(named)[0]


def test_columns_of_problems_and_single_ones_tell_the_network_the_same():
    np = pytest.importorskip("numpy")
    asked = [each[0] for each in TAKEN.values() if each[0].direction == "w"]
    rows = [plans.row_of(each) for each in asked]
    columns = plans.network_inputs(np.array(rows).T, "w", lambda values: np.log2(np.maximum(values, 1)), np.minimum)
    singly = [plans.network_inputs(row, "w") for row in rows]
    assert np.array([np.asarray(column, float) for column in columns]).T.tolist() == np.array(singly, float).tolist()
