"""Many simulations: means over seeds, pairs, files that are kept, processes that die, and `ullage simulate --seeds`."""

import json

import pytest
from tests.commands import typed_in

import ullage.manager
import ullage.manager.simulation
from ullage.errors import InvalidValue, UnknownName
from ullage.manager.simulation import report
from ullage.manager.simulation import sweeps as sweeping
from ullage.manager.simulation.measures import Target
from ullage.manager.simulation.scenario import Scenario, variants
from ullage.manager.simulation.statistics import Interval, changes
from ullage.manager.simulation.sweeps import TraceSource, answers, cases, run_cases, summarize

DRAWN = TraceSource(drawn=(("jobs", 12), ("gpus", 2), ("load", 2.0)))
SCENARIOS = variants(Scenario(gpus="2xA100-40GB"), {"policy": ["exclusive", "magm"]})
CASES = cases([DRAWN], SCENARIOS, range(3))


@pytest.fixture(scope="module")
def outcomes():
    return list(run_cases(CASES))


def test_a_mean_is_as_sure_as_students_t_says():
    found = Interval.of([10.0, 12.0, 14.0])
    assert (found.mean, found.half) == (12.0, pytest.approx(4.303 * 2 / 3**0.5, rel=1e-3))
    assert Interval.of([3.0]).half is None and Interval.of([3.0]).sign == 0
    assert [Interval(mean, 1.0, 5).sign for mean in (-2.0, 0.5, 2.0)] == [-1, 0, 1]


def test_changes_are_taken_in_pairs():
    found = changes([50.0, 500.0], [100.0, 1000.0])
    assert (found.mean, found.half) == (-0.5, 0.0)  # sure, although the seeds differ tenfold
    assert changes([1.0], [0.0]) is None
    assert abs(changes([1.0, 90.0, 110.0], [0.0, 100.0, 100.0]).mean) < 0.01  # one seed without waiting is no matter


def test_scenarios_are_compared_on_the_same_seeds(outcomes):
    first, second = summarize(CASES, outcomes[::-1])
    assert (first.scenario.name, second.scenario.name) == ("exclusive", "magm")
    assert first.changes == {} and first.figures["total"].count == 3
    each = [(o.case.scenario.policy, o.case.scenario.seed, o.figures.total_s) for o in outcomes]
    totals = {policy: [total for name, _, total in sorted(each) if name == policy] for policy in ("exclusive", "magm")}
    assert second.changes["total"] == changes(totals["magm"], totals["exclusive"])
    assert len(set(totals["magm"])) == 3  # another seed is another trace


def test_processes_give_what_one_gives(outcomes):
    with_two = list(run_cases(CASES[:3], workers=2))
    assert {o.case: o.figures for o in with_two} == {o.case: o.figures for o in outcomes[:3]}


def test_a_dead_process_is_reported_and_the_others_continue(tmp_path):
    (tmp_path / "deadly.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    dying = sweeping.Case(DRAWN, Scenario(gpus="T4", policy=f"{tmp_path / 'deadly.py'}:choose"))
    found = {o.case: o for o in run_cases([dying, CASES[0]], workers=2)}
    assert found[dying].error == "its process ended with exit code -9" and found[CASES[0]].figures.done == 12


def test_a_failed_simulation_names_its_scenario():
    wanted = cases([TraceSource("/no/such/trace.csv")], SCENARIOS, [0])
    rows = summarize(wanted, run_cases(wanted))
    assert len(rows) == len(SCENARIOS)
    assert all("/no/such/trace.csv" in row.errors[0] and not row.figures for row in rows)


def test_figures_that_are_kept_are_not_computed_again(outcomes, tmp_path, monkeypatch):
    file = tmp_path / "kept.jsonl"
    assert len(list(run_cases(CASES[:4], cache=file))) == 4
    file.write_text(file.read_text() + '{"key": "torn')
    ran = []
    monkeypatch.setattr(
        sweeping, "run_case", lambda case: ran.append(case) or next(o for o in outcomes if o.case == case)
    )
    found = list(run_cases(CASES, cache=file))
    assert ran == CASES[4:] and {o.case: o.figures for o in found} == {o.case: o.figures for o in outcomes}
    assert len(file.read_text().splitlines()) == 6
    other = tmp_path / "mine.jsonl"
    other.write_text('{"mine": 1}\n')
    with pytest.raises(InvalidValue, match="must hold figures"):
        list(run_cases(CASES, cache=other))
    assert other.read_text() == '{"mine": 1}\n'


def test_a_target_is_a_figure_and_a_limit():
    assert Target.parse("energy<30MJ").limit == 30e6 and Target.parse("energy<500kJ").limit == 5e5
    assert Target.parse("energy<2kWh").limit == 7.2e6 and Target.parse("smact >= 40%").limit == 0.4
    assert not Target.parse("waiting<=1h").met(None)
    with pytest.raises(UnknownName, match="did you mean 'waiting'"):
        Target.parse("waitin<=10m")
    with pytest.raises(InvalidValue, match="a target must be a condition such as"):
        Target.parse("waiting")
    with pytest.raises(InvalidValue, match="energy must look like 500kJ"):
        Target.parse("energy<=much")


def row(gpus, waiting, unplaced=0.0):
    figures = {"waiting": Interval.of([waiting]), "unplaced": Interval.of([unplaced])}
    return sweeping.SweepRow(DRAWN, Scenario(gpus=gpus, label=gpus), figures, {}, [])


def test_the_first_number_of_gpus_that_meets_a_target_is_found():
    target = Target.parse("waiting<=60")
    rows = [row("1xT4", 30.0, unplaced=1.0), row("2xT4", 90.0), row("3xT4", 50.0), row("4xT4", 20.0)]
    (answer,) = answers(rows, target)
    assert (answer.enough.scenario.gpus, answer.short.scenario.gpus) == ("3xT4", "2xT4")
    (none,) = answers(rows[:2], target)
    assert none.enough is None and none.short is rows[1]


def test_the_page_has_intervals_and_changes(outcomes, tmp_path):
    report.write_sweep(summarize(CASES, outcomes), tmp_path / "sweep.html")
    text = (tmp_path / "sweep.html").read_text()
    assert text.count('<div class="row">') == 8 and "<u style" in text and "magm" in text and " ± " in text


# The command


@pytest.fixture
def typed(monkeypatch, capsys):
    return typed_in(monkeypatch, capsys)


DRAW = ("simulate", "--generate", 12, "--load", 2, "--workers", 1, "--gpus")


def test_the_command_prints_means_and_changes(typed, tmp_path):
    kept = tmp_path / "kept.jsonl"
    words = (*DRAW, "2xA100-40GB", "--policy", "exclusive,magm", "--seeds", 3, "--resume", kept)
    code, out, err = typed(*words)
    assert code == 0, err
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["scenario", "exclusive", "magm"] and "±" in lines[1]
    assert any(line.startswith("against exclusive") for line in lines)
    code, out, _ = typed(*words, "--json")
    found = json.loads(out)
    assert code == 0 and len(found["rows"]) == 2 and len(kept.read_text().splitlines()) == 6
    assert set(found["rows"][0]["figures"]["total"]) == {"mean", "low", "high", "count"}


def test_the_command_says_how_many_gpus_are_enough(typed):
    code, out, _ = typed(*DRAW, "1..3xA100-40GB", "--policy", "magm", "--seeds", 1, "--target", "waiting<=1000h")
    assert code == 0 and "1xA100-40GB" in out.splitlines()[-1] and "is enough" in out.splitlines()[-1]
    code, out, _ = typed(*DRAW, "1..2xA100-40GB", "--seeds", 1, "--target", "total<=1s", "--json")
    assert [each["enough"] for each in json.loads(out)["answers"]] == [None]


def test_seeds_without_chance_are_reported(typed, tmp_path):
    from tests.manager.simulation.test_simulate_command import HEAD, ROW

    file = tmp_path / "jobs.csv"
    file.write_text(HEAD + ROW.format(0, 0.0))
    code, out, _ = typed("simulate", file, "--gpus", "A100-40GB", "--seeds", 2, "--workers", 1, "--disable", "all")
    assert code == 0 and "every seed gave the same" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((*DRAW, "T4", "--seeds", 2, "--save", "runs.json"), 2, "--save and --seeds exclude each other"),
        ((*DRAW, "T4", "--target", "much"), 2, "a target must be a condition such as"),
        ((*DRAW, "T4", "--policy", "magn"), 2, "did you mean 'magm'"),
        ((*DRAW, "T4", "--load", 0), 2, "--load must be a number above 0 such as 0.8, got 0"),
        ((*DRAW, "T4", "--load", "inf"), 2, "--load must be a number above 0 such as 0.8, got inf"),
        (("simulate", "/no/such.csv", "--gpus", "T4", "--seeds", 2, "--workers", 1), 1, "/no/such.csv"),
    ],
)
def test_mistakes_are_reported(typed, words, code, said):
    found, out, err = typed(*words)
    assert found == code and said in out + err and "Traceback" not in err


def test_the_python_function_gives_the_same_rows(outcomes):
    rows = ullage.manager.simulation.sweep(
        dict(jobs=12, gpus=2, load=2.0), gpus="2xA100-40GB", policy=["exclusive", "magm"], seeds=3
    )
    assert [row.figures for row in rows] == [row.figures for row in summarize(CASES, outcomes)]
    with pytest.raises(UnknownName, match="did you mean 'policy'"):
        ullage.manager.simulation.sweep("jobs.csv", gpus="T4", polic="magm")
