"""The model of sharing, fitted: figures that made the data are found again, and judged on families left out."""

import gzip
import json
import random
from dataclasses import replace

import pytest

from ullage.cli.main import main
from ullage.errors import InvalidValue
from ullage.hardware import gpu
from ullage.performance.alone import utilization_of
from ullage.performance.contention import SharingRules
from ullage.performance.result import Utilization
from ullage.performance.sharing import load, share_of
from ullage.performance.step import StepCalls
from ullage_lab.train import sharing as training

RULES = SharingRules(overlap=6.0, contention=1.3, crowding=0.15, closing=0.5, turn_s=1e-3, switch_s=2e-4, idle_w=100.0)
NUMBERS = {"shape": [4096, 4096], "dtype": "float32"}
WAIT, KERNEL = (
    {"operator": "cuda.synchronize"},
    {"operator": "aten.relu.default", "args": [NUMBERS], "kwargs": {}, "outputs": [NUMBERS]},
)
MODELS = ("tv:resnet18", "tv:vgg11", "hf:GPT2Model", "hf:BertModel")  # the first is for testing, the others not


def rows_of(rules: SharingRules, count: int, of: int = 12) -> tuple[list, dict]:
    """Sets of jobs as they would be measured if the model were true."""
    chance = random.Random(7)
    names = [f"job{number}" for number in range(of)]
    alone, rows, steps = {}, [], {}
    for number, name in enumerate(names):
        busy, step_s, waits = chance.uniform(0.2, 1), chance.uniform(0.005, 0.08), chance.choice([2, 2, 40])
        figures = {"smact": busy * 0.8, "smocc": 0.1, "drama": 0.1 * busy, "tensor": 0.0}
        kernels = chance.randint(50, 2000)
        steps[name] = StepCalls(calls=[WAIT, KERNEL], order=[0] * waits + [1] * kernels)
        job = {"id": name, "model": MODELS[number % len(MODELS)], "batch": 2}
        alone[name] = Utilization(
            gpu="H200",
            step_s=step_s,
            gpu_s=busy * step_s,
            host_s=step_s,
            power_w=150 + 300 * busy,
            energy_j=1.0,
            flops=0,
            bytes=0,
            kernels=kernels,
            steady=True,
            measured=True,
            waits=waits,
            **figures,
            kernel_groups=utilization_of(steps[name], gpu("H200")).kernel_groups,
        )
        for how in training.HOWS:
            rows.append(
                {
                    "session": 1,
                    "how": how,
                    "alone": name,
                    "jobs": [name],
                    "job": job,
                    "step_s": [step_s],
                    "gract": busy,
                    "power_w": alone[name].power_w,
                    **figures,
                }
            )
    for number in range(count):
        jobs = chance.sample(names, min(of, chance.choice([2, 2, 3, 5])))
        for how in training.HOWS:
            found = share_of([alone[name] for name in jobs], gpu("H200"), how, rules=rules)
            row = {
                "session": 1,
                "how": how,
                "set": f"s{number}",
                "jobs": jobs,
                "step_s": [job.step_s for job in found.jobs],
            }
            rows.append(row | {"power_w": found.power_w})
    return rows, steps


@pytest.fixture(scope="module")
def fitted():
    rows, steps = rows_of(RULES, 30)
    alone = training.measured_alone(rows, steps)
    sets = training.sets_of(rows, alone)
    return sets, alone, training.fit(sets, alone)


def test_the_figures_that_made_the_sets_are_found_again(fitted):
    sets, _, rules = fitted
    assert len(sets) == 60 and 0 < sum(one.is_test for one in sets) < 60
    assert rules.contention == pytest.approx(RULES.contention, rel=0.1)
    assert rules.crowding == pytest.approx(RULES.crowding, rel=0.3)
    assert rules.closing == pytest.approx(RULES.closing, rel=0.3)
    assert rules.turn_s == pytest.approx(RULES.turn_s, rel=0.3)
    assert rules.switch_s == pytest.approx(RULES.switch_s, rel=0.3)
    assert rules.idle_w == RULES.idle_w


def test_it_is_judged_on_sets_with_families_that_were_left_out(fitted):
    sets, alone, rules = fitted
    lines = {(line.figure, line.how, line.sets): line for line in training.lines_of(sets, alone, rules=rules)}
    for how in training.HOWS:
        slowdown = lines[training.SLOWDOWN, how, "pairs"]
        assert slowdown.value < 0.03 < slowdown.constant
        assert slowdown.count == sum(one.is_test and one.how == how and len(one.jobs) == 2 for one in sets)
        keeps = lines[training.KEEPS_SPEED, how, "pairs"]
        assert keeps.value > 0.9 and keeps.value >= keeps.constant and 0 <= keeps.always_yes <= 1
        regret = lines[training.REGRET, how, "pairs"]
        assert regret.value < 0.005 < regret.constant
    worse = training.lines_of(sets, alone, {key: alone[1, key[1], "job0"] for key in alone}, rules)
    measured, told = (line for line in worse[:8] if line.figure == training.SLOWDOWN)
    assert (measured.inputs, told.inputs) == ("measured", "predicted") and told.value > 5 * measured.value


def test_how_far_true_losses_scatter_about_the_predicted_ones(fitted):
    sets, alone, rules = fitted
    spreads = training.loss_spread(sets, alone, rules)
    assert spreads and max(spreads.values()) < 0.15
    chance = random.Random(3)
    scattered = [
        replace(one, slowdown=tuple(1 + (told - 1) * chance.lognormvariate(0, 0.4) for told in told_of))
        for one in sets
        for told_of in [training.slowdowns(one, alone, rules)]
        for _ in range(10)
    ]
    spread = training.loss_spread(scattered, alone, rules)
    assert spread == {how: pytest.approx(0.4, abs=0.06) for how in training.HOWS}
    known = [replace(one, is_test=False) for one in scattered]
    assert training.loss_spread(known, alone, rules) == {}


def test_a_set_that_was_read_in_turns_has_its_own_slowdowns():
    rows, steps = rows_of(RULES, 1)
    alone = training.measured_alone(rows, steps)
    (before,) = [one for one in training.sets_of(rows, alone) if one.how == "mps"]
    turns = [
        {"step_s": [own * slow for own in (1.0, 2.0)], "alone_s": [1.0, 2.0]} for slow in (1.5, 9.0, 1.6, 1.4, 1.5)
    ]
    pair = {"session": 1, "how": "mps", "set": "pair", "jobs": ["job1", "job2"], "step_s": [7.0, 7.0], "turns": turns}
    known, found = [one for one in training.sets_of([*rows, pair], alone) if one.how == "mps"]
    assert known == before and found.slowdown == pytest.approx((1.5, 1.5))
    assert training.noise_of_turns(rows) == {}
    noise = training.noise_of_turns([*rows, pair])
    steady = training.noise_of_turns([{**pair, "turns": turns[:1] * 5}])
    assert steady == {"mps": 0.0} and noise["mps"] > 0


def test_a_job_that_was_read_twice_has_its_middle_step():
    rows, steps = rows_of(RULES, 1)
    again = dict(rows[0], set="again", step_s=[rows[0]["step_s"][0] * 1.2])
    again.pop("alone")
    alone = training.measured_alone([*rows, again], steps)
    assert alone[1, "mps", "job0"].step_s == pytest.approx(rows[0]["step_s"][0] * 1.1)
    assert alone[1, "mps", "job0"].waits == steps["job0"].waits
    assert training.noise([*rows, again]) == {"mps": pytest.approx(0.2)}


def test_a_set_that_was_read_several_times_has_its_middle_steps():
    rows, steps = rows_of(RULES, 1)
    alone = training.measured_alone(rows, steps)
    row = next(row for row in rows if "set" in row and row["how"] == "mps")
    again = [
        dict(row, set=f"again {factor}", step_s=[factor * step for step in row["step_s"]]) for factor in (1.1, 9.0)
    ]
    once, often = ([one for one in training.sets_of(each, alone) if one.how == "mps"] for each in (rows, rows + again))
    assert len(once) == len(often) == 1
    assert often[0].slowdown == pytest.approx([1.1 * slow for slow in once[0].slowdown])


@pytest.fixture
def small_jobs_together(tmp_path):
    """A packed file of sets of small jobs, and its rows."""
    rows, _ = rows_of(RULES, 6, of=3)
    for row in rows:
        if "alone" in row:
            settings = {"widths": [8, 4], "act": "relu", "batch_norm": False, "dropout": 0.0}
            row["job"] = {
                "id": row["alone"],
                "model": "ullage_lab.networks.generated:mlp",
                "input": [8],
                "batch": 2,
                "classes": 4,
                "settings": settings,
                "arch": "uniform" if row["alone"] == "job0" else "pyramid",
            }
    rows.append({"how": "mps", "set": "lost", "jobs": ["job0", "job1"], "failed": "no steps in 120 s"})
    file = tmp_path / "together.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return file, rows


def test_the_command_fits_and_writes(small_jobs_together, tmp_path, monkeypatch, capsys):
    file, rows = small_jobs_together
    out = tmp_path / "sharing.json"
    monkeypatch.setattr("sys.argv", ["ullage", "lab", "train", "sharing", "--data", str(file), "--out", str(out)])
    monkeypatch.setenv("COLUMNS", "130")
    main()
    shown = capsys.readouterr().out
    assert "slowdown, mean error" in shown and "measured" in shown and "predicted" in shown
    assert "times exp(±" in shown
    assert load(out).contention >= 0.5
    card = json.loads(out.read_text())["card"]
    different = {(row["how"], *row["jobs"]) for row in rows if "set" in row and "failed" not in row}
    assert sum(card["sets"].values()) + card["for_testing"] == len(different) and card["for_testing"] > 0


def test_sets_of_jobs_are_judged_without_runs_alone(small_jobs_together, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["ullage", "lab", "evaluate", "utilization", "--data", str(small_jobs_together[0]), "--json"]
    )
    main()
    found = json.loads(capsys.readouterr().out)
    assert found["alone"] == [] and {line["inputs"] for line in found["together"]} == {"measured", "predicted"}


def test_a_file_without_sets_is_refused_before_any_run(tmp_path, monkeypatch, capsys):
    other = tmp_path / "notes.txt"
    other.write_text("not JSON\n")
    monkeypatch.setattr("sys.argv", ["ullage", "lab", "evaluate", "utilization", "--data", str(other)])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().err
    assert "notes.txt" in told and "following" not in told


def test_rows_with_the_old_spelling_of_time_slicing(tmp_path):
    old = {"how": "timeslice", "set": "one", "jobs": ["a", "b"], "step_s": [2.0, 2.0]}
    (tmp_path / "old.jsonl").write_text(json.dumps(old) + "\n")
    (row,) = training.read_rows([tmp_path / "old.jsonl"])
    assert row["how"] == "time-slicing" and row["how"] in training.HOWS


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"header": {}}\n')
    with pytest.raises(InvalidValue, match="no sets of jobs; 'ullage lab measure together' writes them"):
        training.read_rows([tmp_path / "empty.jsonl"])
    with pytest.raises(InvalidValue, match="cannot read"):
        training.read_rows([tmp_path / "nothing.jsonl.gz"])
    row = {"how": "mps", "set": "one", "jobs": ["a", "b"], "step_s": [2.0, 2.0]}
    for turn in (7, {}, {"step_s": [2.0, 2.0], "alone_s": [1.0]}, {"step_s": [2.0, None], "alone_s": [1.0, 1.0]}):
        (tmp_path / "damaged.jsonl").write_text(json.dumps(row | {"turns": [turn]}) + "\n")
        with pytest.raises(InvalidValue, match="damaged.jsonl: the turns of set 'one' are not those of"):
            training.read_rows([tmp_path / "damaged.jsonl"])
    with pytest.raises(InvalidValue, match="there must be sets for fitting"):
        training.fit([], {})
