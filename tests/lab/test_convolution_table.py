"""What is made of measured workspaces: formulas that give their sizes again, and which layers are odd."""

import json
import random
import shutil

import numpy as np
import pytest

from ullage.virtual.cudnn import workspaces
from ullage.virtual.cudnn.formulas import (
    FOURIER,
    WIDE,
    WINOGRAD,
    ConvolutionProblem,
    Formula,
    by_median,
    by_votes,
    evaluate,
    terms,
    transform_bytes,
)
from ullage.virtual.cudnn.workspaces import features
from ullage_lab.train import trials
from ullage_lab.train import workspaces as table
from ullage_lab.train.workspaces import find_formulas, has_odd_channels, label


def problem(batch, inner, outer, groups=1, kind="f32", side=8):
    shapes = (batch, inner, side, side), (outer, inner // groups, 1, 1), (batch, outer, side, side)
    return ConvolutionProblem("w", *shapes, (1, 1), (0, 0), (1, 1), groups, kind, False)


def part_of(rows):
    return table.measured_part(rows)


def test_a_formula_that_explains_a_size_gives_it_again(monkeypatch):
    monkeypatch.setattr(table, "_LEAST", 2)
    chance = random.Random(1)
    partials = Formula(0, 0, 0, 1, -1, 0, 0)  # a partial result for every sample
    problems = [problem(chance.randint(1, 64), 8 * chance.randint(1, 30), 8 * chance.randint(1, 30)) for _ in range(60)]
    rows = [(one, evaluate(partials, terms(one))) for one in problems]
    # Grouped layers know a padding that the others do not: a formula with it must not count as one of the others'.
    grouped = [problem(chance.randint(1, 64), 24 * groups, 24 * groups, groups) for groups in range(2, 12)]
    rows += [(one, evaluate(partials._replace(weight=WIDE), terms(one))) for one in grouped]
    found = find_formulas(part_of(rows))
    labels, formulas = label(part_of(rows), [formula for formula, _ in found])
    assert found[0][0] == partials
    assert [evaluate(formulas[number], terms(one)) for number, (one, _) in zip(labels, rows, strict=True)] == [
        size for _, size in rows
    ]


def test_the_formula_of_a_method_explains_only_its_own_problems(monkeypatch):
    monkeypatch.setattr(table, "_LEAST", 2)
    square = [problem(8, 8 * n, 16, side=4 * n)._replace(weight=(16, 8 * n, 3, 3), padding=(1, 1)) for n in range(1, 9)]
    plain = [problem(8, 8 * n, 16) for n in range(1, 30)]
    rows = [(one, terms(one).buffers[WINOGRAD]) for one in square] + [(one, 0) for one in plain]
    shares = dict(find_formulas(part_of(rows)))
    by_method = Formula(0, 0, 0, 0, 0, 0, 0, WINOGRAD)
    assert shares[by_method] == pytest.approx(len(square) / len(rows))
    assert sum(shares.values()) == pytest.approx(1)


def test_fourier_votes_count_only_if_cudnn_has_such_plans():
    square = problem(8, 72, 72, side=128)._replace(weight=(72, 72, 1, 5), padding=(0, 2))
    dilated = square._replace(dilation=(1, 2), padding=(0, 4))
    votes = [(Formula(0, 0, 0, 0, 0, 0, 0, FOURIER), 3.0), (Formula(1, 1, 0, 0, 0, 0, 0), 1.0)]
    copies = sum(terms(dilated).source[1:2] + terms(dilated).out[1:2])
    assert by_votes(votes, terms(square)).size == transform_bytes(square) > copies
    assert by_votes(votes, terms(dilated))[:2] == (copies, copies)


def test_median_of_votes_is_not_moved_by_one_that_is_far_off():
    parts = terms(problem(8, 64, 64))
    sizes = {name: Formula(0, 0, 0, 0, 0, size, 0) for name, size in (("low", 900), ("high", 1000), ("far", 9000))}
    votes = [(sizes["low"], 2.0), (sizes["high"], 2.0), (sizes["far"], 3.0)]
    assert by_votes(votes, parts).size == 9000
    assert by_median(votes, parts).size == 1000
    assert by_median(votes, parts).larger == 9000
    assert by_median([*votes, (sizes["far"], 4.0)], parts).size == 9000
    assert by_median([], parts).size == 0


def test_labels_are_what_evaluating_each_formula_says():
    chance = random.Random(2)
    formulas = [Formula(0, 0, 0, 0, 0, 0, 0), Formula(2, 2, 2, 0, 0, 16, 0), Formula(3, 3, 0, 4, 5, 144, 16)]
    rows = []
    for _ in range(40):
        groups = chance.choice((1, 1, 3))
        inner, outer = groups * chance.randint(1, 40), groups * chance.randint(1, 40)
        one = problem(chance.randint(1, 9), inner, outer, groups, chance.choice(("f32", "f16")))
        rows.append((one, evaluate(chance.choice(formulas), terms(one)) + chance.choice((0, 0, 5))))
    labels, known = label(part_of(rows), formulas)
    for number, (one, size) in zip(labels, rows, strict=True):
        fitting = [place for place, formula in enumerate(formulas) if evaluate(formula, terms(one)) == size]
        assert number == fitting[0] if fitting else number >= len(formulas)
        assert number < len(known)


def test_odd_channels_are_those_of_a_group():
    assert has_odd_channels(problem(1, 12, 16))
    assert has_odd_channels(problem(1, 16, 24, groups=4))
    assert not has_odd_channels(problem(1, 16, 24))


def test_features_are_integers_in_single_precision_order():
    small, large = features(problem(1, 1, 1, side=1)), features(problem(256, 2048, 2047, kind="f16", side=230))
    assert len(small) == len(large) < 128  # a tree names a feature in one byte
    assert all(isinstance(value, int) and value >= 0 for value in small + large)
    assert np.isfinite(np.array(large, dtype=np.float32)).all()


def test_the_largest_plans_are_read_from_what_cudnn_was_asked(tmp_path):
    asked = ["f", [1, 8, 4, 4], [8, 8, 1, 1], [1, 8, 4, 4], [1, 1], [0, 0], [1, 1], 1, "f32", False]
    plans = [[3, 1 << 3, 900], [62, 1, 40], [22, 2, 5000]]  # the last one converts its inputs to half precision
    rows = [{"problem": asked, "candidates": plans}, {"problem": asked, "declined": "cuDNN declined the graph"}]
    path = tmp_path / "plans.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(trials.asked_problems(path).values()) == [trials.LargestPlans(transform=900, others=40)]


def test_a_size_gets_the_nearest_formula():
    one = problem(64, 480, 320, side=32)
    parts = terms(one)
    copies = sum(sizes[1] for sizes in (parts.source, parts.out))
    sizes = [0, copies, copies + (132 << 16), 64 * parts.weight[1], 3 * copies]
    formulas = trials.nearest_formulas(part_of([(one, size) for size in sizes]))
    assert [evaluate(formula, parts) for formula in formulas] == [pytest.approx(size, rel=0.03) for size in sizes]


def test_a_method_is_only_named_where_it_applies():
    winograd = problem(64, 480, 320, side=32)._replace(weight=(320, 480, 3, 3), padding=(1, 1))
    dilated = winograd._replace(dilation=(2, 2), padding=(2, 2))
    rows = [(one, terms(one).buffers[WINOGRAD] or sum(terms(one).source)) for one in (winograd, dilated)]
    assert [formula.buffer == WINOGRAD for formula in trials.nearest_formulas(part_of(rows))] == [True, False]


def test_added_trees_vote_with_the_existing_ones(tmp_path, monkeypatch):
    asked = [problem(batch, 16, 16, side=24) for batch in (1, 2, 32, 64)]
    shutil.copy(workspaces.DATA_FOLDER / workspaces.TRIAL_TREES, tmp_path)
    monkeypatch.setattr(workspaces, "DATA_FOLDER", tmp_path)

    def by_transforms(one):
        workspaces.trees.cache_clear()
        found = workspaces.votes(one, workspaces.TRIAL_TREES, workspaces.TRANSFORM)
        return sum(share for formula, share in found if formula.buffer == FOURIER), sum(share for _, share in found)

    def others(one):
        workspaces.trees.cache_clear()
        return dict(workspaces.votes(one, workspaces.TRIAL_TREES, workspaces.OTHERS))

    before, known = [by_transforms(one) for one in asked], others(asked[0])
    trials.add_trees(
        {one: trials.LargestPlans(900 * (one in asked[2:]), 40 << 20) for one in asked}, tmp_path, 2, 8, str
    )
    for place, one in enumerate(asked):
        share, total = (after - known for after, known in zip(by_transforms(one), before[place], strict=True))
        assert (share, total) == (pytest.approx(2.0 * (place > 1)), pytest.approx(2.0))
    added = {formula: share - known.get(formula, 0) for formula, share in others(asked[0]).items()}
    named = [formula for formula, share in added.items() if share > 1]
    assert [evaluate(formula, terms(asked[0])) for formula in named] == [pytest.approx(40 << 20, rel=0.03)]
