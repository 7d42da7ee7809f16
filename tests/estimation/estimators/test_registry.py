"""One registry, one workload, one answer."""

import json

import pytest

from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.estimators import estimators
from ullage.estimation.estimators.answer import answer
from ullage.estimation.estimators.registry import find
from ullage.estimation.result import Estimate
from ullage.hardware import gpu
from ullage.jobs import Model
from ullage.jobs.job import JobRequest, Script, Summary

SMALL = JobRequest(Model("mlp:x", settings={"widths": [64, 32, 10]}, batch_size=4, optimizer="adam"))


@pytest.mark.parametrize("name", estimators())
def test_every_estimator_says_where_it_comes_from(name: str) -> None:
    found = find(name)
    assert found.name == name
    assert found.title and found.source and found.needs


def test_an_unknown_name_lists_all() -> None:
    with pytest.raises(UnknownName) as caught:
        find("oracle")
    assert all(name in str(caught.value) for name in estimators())


def test_ullage_is_the_first_and_the_default() -> None:
    assert estimators()[0] == "ullage"
    by_name = find("ullage").estimate(SMALL, gpu("T4"))
    assert (by_name.estimator, by_name.figure, by_name.figure_kind) == ("ullage", by_name.process_memory, "process")


def test_a_job_has_one_kind() -> None:
    kinds = [JobRequest(job).kind for job in (print, Script("train.py"), Summary("x.txt", ""), SMALL.job)]
    assert kinds == ["function", "script", "summary", "model"]


def test_unsupported_jobs_are_refused_with_the_reason() -> None:
    with pytest.raises(InvalidValue, match="a summary has no code to run"):
        find("ullage").estimate(JobRequest(Summary("x.txt", "Linear-1")), gpu("T4"))


@pytest.mark.parametrize("kind", ["allocated", "reserved", "process"])
def test_an_answer_leaves_out_what_it_does_not_know(kind: str) -> None:
    e = answer("sample", gpu("T4"), kind, {"parameters": 3 << 20}, seconds=0.5, notes=["only weights"])
    figures = [e.peak_allocated, e.peak_reserved, e.process_memory]
    assert sorted(figures, key=str) == [3 << 20, None, None]
    assert (e.figure, e.upper, e.bound, e.headroom) == (3 << 20, None, 3 << 20, gpu("T4").usable - (3 << 20))
    assert Estimate.from_dict(json.loads(e.to_json())) == e
    assert "3.00 MiB" in str(e) and "only weights" in str(e) and "None" not in str(e)
    assert "None" not in e._repr_html_()
    with pytest.raises(InvalidValue, match="does not know"):
        e.peaks  # noqa: B018


def test_an_answer_larger_than_the_gpu_does_not_fit() -> None:
    e = answer("sample", gpu("T4"), "process", {"parameters": 1 << 40}, seconds=0.5, notes=[])
    assert not e.fits and e.headroom < 0 and e.verdict.startswith("DOES NOT FIT")


def test_an_estimator_of_activity_knows_no_memory() -> None:
    pytest.importorskip("ullage_lab")
    e = find("gpuutilnet").estimate(SMALL, gpu("H200"))
    assert (e.fits, e.headroom, e.process_memory, list(e.activity)) == (None, None, None, ["smact", "smocc", "drama"])
    for known in e.activity.values():
        assert 0 <= known["least"] < known["most"] <= 1 and 1 / 3 <= known["probability"] <= 1
    assert Estimate.from_dict(json.loads(e.to_json())) == e
    assert str(e).startswith("mlp:x\n? the memory on H200 is unknown") and "None" not in str(e)
    with pytest.raises(InvalidValue, match="gpuutilnet does not know process_memory"):
        e.figure  # noqa: B018
