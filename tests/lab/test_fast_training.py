"""`fast`: trees as arrays, a bound that holds, groups that are never split, files."""

import math

import numpy as np
import pytest
from tests.lab.synthetic import rows

from ullage.errors import InvalidValue
from ullage.estimation.estimators.registry import find
from ullage.hardware import gpu
from ullage.jobs import Model
from ullage.jobs.job import JobRequest
from ullage_lab.estimators.fast.estimator import NAMES, closed_bytes, load, parts_of, save, vector_of
from ullage_lab.train.fast import FOLDS, _group_folds, _grow, conformal, jobs_of, train_fast


@pytest.fixture(scope="module", autouse=True)
def _trees():
    """Imported when the first of these tests runs: that takes seconds, in every process that collects them."""
    pytest.importorskip("lightgbm")


@pytest.fixture(scope="module")
def trained():
    jobs = jobs_of(rows(400), [row | {"group": f"real {place % 7}"} for place, row in enumerate(rows(60, seed=2))])
    model, unseen = train_fast(jobs, gpu="H200")
    return jobs, model, unseen


@pytest.mark.slow
def test_it_is_far_better_than_the_formula_on_unseen_jobs(trained) -> None:
    _, model, _ = trained
    for kind in ("generated", "real"):
        assert model.card[kind]["median"] < 0.06
        assert model.card[kind]["median"] < model.card[kind]["formula_median"] / 2


def test_the_bound_holds_for_99_in_100_unseen_jobs(trained) -> None:
    _, model, _ = trained
    fresh = rows(300, seed=9)
    held = [row["peak_reserved"] <= model.reserved(row)[1] for row in fresh]
    assert np.mean(held) >= 0.97
    assert model.card["generated"]["covered"] >= 0.985 and model.card["generated"]["bound_above"] < 0.5


def test_groups_are_never_split() -> None:
    groups = [f"g{place % 23}" for place in range(200)]
    seen = []
    for fit, validate in _group_folds(groups, seed=1):
        assert not {groups[place] for place in fit} & {groups[place] for place in validate}
        seen += validate.tolist()
    assert sorted(seen) == list(range(200)) and FOLDS == 5


def test_arrays_say_what_lightgbm_says() -> None:
    import lightgbm

    random = np.random.default_rng(0)
    features = random.normal(size=(300, len(NAMES)))
    target = features[:, 0] * 2 + np.abs(features[:, 1])
    options = {"objective": "quantile", "alpha": 0.5, "verbosity": -1, "num_leaves": 15}
    booster = lightgbm.train(options, lightgbm.Dataset(features, target), num_boost_round=20)
    from ullage_lab.train.trees import from_lightgbm

    trees = from_lightgbm(booster)
    assert [trees.sum(line) for line in features[:50]] == pytest.approx(booster.predict(features[:50]).tolist())
    assert trees.sums(features).tolist() == pytest.approx(booster.predict(features).tolist())
    assert trees.sums(features[:0]).tolist() == []


def test_the_same_seed_gives_the_same_trees() -> None:
    random = np.random.default_rng(0)
    features, target = random.normal(size=(200, len(NAMES))), random.normal(size=200)
    first, second, other = (_grow(features, target, "middle", seed) for seed in (1, 1, 2))
    assert np.array_equal(first.value, second.value) and not np.array_equal(first.value, other.value)


def test_conformal_counts_the_job_to_come() -> None:
    scores = np.arange(1.0, 101.0)
    assert conformal(scores, 0.99) == 100.0 and conformal(scores, 0.5) == 51.0


def test_the_formula_takes_the_higher_of_two_peaks() -> None:
    base = {"batch_size": 1, "parameters": 1000, "layers": [], "optimizer": "adam", "precision": "fp32"}
    small, large = (closed_bytes(parts_of(base | {"kept_numbers": kept})) for kept in (0, 10_000))
    assert small == 4000 * 3 + 4000 * 2 + 66 * 2**20
    assert large == 4000 * 3 + 40_000 + 66 * 2**20


def test_a_row_without_details_works_too() -> None:
    features, closed = vector_of({"batch_size": 4, "parameters": 10, "activations": 5})
    assert len(features) == len(NAMES) and math.isfinite(closed)


def test_weights_come_back_and_the_estimator_uses_them(trained, tmp_path) -> None:
    _, model, _ = trained
    file = tmp_path / "fast.safetensors"
    save(model, file)
    again, row = load(file), rows(1, seed=5)[0]
    assert again.reserved(row) == pytest.approx(model.reserved(row), rel=1e-5)
    job = JobRequest(
        Model("mlp:x", settings={"widths": [512, 512, 10]}, batch_size=32, optimizer="adam"),
        options={"weights": str(file)},
    )
    e = find("fast").estimate(job, gpu("A100-40GB"))
    assert e.figure_kind == "process" and e.upper >= e.figure > e.peak_reserved > 0
    assert any("H200" in note for note in e.notes)


@pytest.mark.parametrize("content", [b"", b"nothing of the kind"])
def test_a_broken_file_is_one_clear_message(content: bytes, tmp_path) -> None:
    file = tmp_path / "fast.safetensors"
    file.write_bytes(content)
    with pytest.raises(InvalidValue, match="cannot read the trees of fast in .* 'ullage lab train fast"):
        load(file)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(InvalidValue, match="training fast needs at least 20 measured rows"):
        jobs_of(rows(3), [])
