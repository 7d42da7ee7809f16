"""`ullage simulate`, typed in this process, on a trace of six jobs."""

import json

import pytest
from tests.commands import typed_in

import ullage
import ullage.manager
import ullage.manager.simulation

HEAD = "arrival,kind,memory,work_s,estimate_horus\n"
ROW = "{},resnet18 cifar100 b32,788MiB,985.2,2231.6MiB\n"


@pytest.fixture
def trace(tmp_path):
    """Six jobs that come within a minute."""
    file = tmp_path / "jobs.csv"
    file.write_text(HEAD + "".join(ROW.format(10.0 * number) for number in range(6)))
    return file


@pytest.fixture
def typed(monkeypatch, capsys):
    return typed_in(monkeypatch, capsys)


def test_policies_are_compared(typed, trace):
    code, out, err = typed(
        "simulate", trace, "--gpus", "2xA100-40GB", "--policy", "exclusive,magm", "-e", "oracle,horus"
    )
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["run", "total", "Δ"]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["exclusive", "magm, oracle", "magm, horus"]
    assert "  -" in lines[2] and "  -" in lines[3]  # sharing is quicker


def test_json_has_what_the_python_function_gives(typed, trace):
    words = ("--gpus", "A100-40GB", "--policy", "magm", "--estimator", "oracle", "--smact-limit", "off")
    code, out, _ = typed("simulate", trace, *words, "--disable", "all", "--label", "mine", "--json")
    (run,) = json.loads(out)["runs"]
    assert code == 0 and run["scenario"]["label"] == "mine" and run["scenario"]["rules"]["smact_limit"] is None
    quiet = dict.fromkeys(("interference_error", "startup_s", "fragmentation", "monitor_delay_s", "retry_s"), 0)
    settings = {"policy": "magm", "estimator": "oracle", "smact_limit": None, "interference": False}
    result = ullage.manager.simulation.simulate(trace, gpus="A100-40GB", **settings, **quiet)
    assert run["figures"] == json.loads(json.dumps(result.figures.to_dict())) and result.figures.done == 6


def test_saved_runs_are_shown_with_others(typed, trace, tmp_path):
    saved, page = tmp_path / "runs.json.gz", tmp_path / "runs.html"
    assert typed("simulate", trace, "--gpus", "A100-40GB", "--save", saved, "--label", "before")[0] == 0
    code, out, err = typed("simulate", trace, "--gpus", "2xA100-40GB", "--compare-with", saved, "--report", page)
    assert code == 0, err
    assert [line.split("  ")[0] for line in out.splitlines()[1:3]] == ["before", "ullage, ullage, mps"]
    assert "before" in page.read_text() and "<rect" in page.read_text()
    code, out, _ = typed("simulate", "--compare-with", saved, "--json")
    assert code == 0 and len(json.loads(out)["runs"]) == 1


def test_after_ctrl_c_the_runs_that_are_done_are_printed(typed, trace, tmp_path, monkeypatch):
    from ullage.manager.simulation import engine

    real, asked = engine.simulate, []

    def simulate(jobs, scenario, progress):
        asked.append(scenario)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(jobs, scenario, progress)

    monkeypatch.setattr(engine, "simulate", simulate)
    saved = tmp_path / "runs.json"
    code, out, _ = typed("simulate", trace, "--gpus", "2xA100-40GB", "--policy", "magm,lug,mug", "--save", saved)
    assert code == 130 and "magm" in out and "lug" not in out
    assert len(json.loads(saved.read_text())["runs"]) == 1


def test_unknown_memory_is_reported(typed, trace):
    _, out, _ = typed("simulate", trace, "--gpus", "A100-40GB", "--policy", "magm", "--estimator", "none")
    assert "each job had a GPU to itself; see --unknown floor" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--gpus must be given"),
        (("--gpus", "4xA100"), "no GPU named 'A100'"),
        (("--gpus", "8..4xT4"), "must be a range such as 4..16xA100-40GB"),
        (("--gpus", "T4", "--policy", "magn"), "did you mean 'magm'"),
        (("--gpus", "T4", "--estimator", "hors"), "did you mean 'horus'"),
        (("--gpus", "T4", "--sharing", "mpx"), "the way of sharing must be one of"),
        (("--gpus", "T4", "--disable", "gravity"), "no part of the simulated world named 'gravity'"),
        (("--gpus", "T4", "--label", "a", "--label", "b"), "--label must be given once per run (1:"),
        (("--gpus", "T4", "--smact-limit", "x"), "a share must be a number such as 0.8"),
    ],
)
def test_mistakes_are_reported_in_a_line(typed, trace, words, said):
    code, out, err = typed("simulate", trace, *words)
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("ullage: ")]) == 1


def test_wrong_traces_and_files_are_reported_and_unchanged(typed, trace, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for option in ("--save", "--report", "--compare-with"):
        code, _, err = typed("simulate", trace, "--gpus", "T4", option, mine)
        assert code == 2 and str(mine) in err and mine.read_text() == "mine"
        assert "simulating" not in err  # it is told at once, not after an hour
    assert typed("simulate", mine, "--gpus", "T4")[0] == 2
    assert typed("simulate")[0] == 2


def test_custom_policy_is_compared_and_its_errors_are_reported(typed, trace, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def choose(job, gpus, past):\n    return gpus[0]\n\n\ndef wrong(job, gpus, past):\n    return gpus.none\n"
    )
    code, out, err = typed("simulate", trace, "--gpus", "2xA100-40GB", "--policy", f"magm,{file}:choose")
    assert code == 0 and f"{file}:choose" in out, err
    code, _, err = typed("simulate", trace, "--gpus", "2xA100-40GB", "--policy", f"{file}:wrong")
    assert code in (1, 2) and "AttributeError" in err and "Traceback" not in err


def test_the_help_tells_the_defaults_of_the_world():
    from ullage.cli import all_commands
    from ullage.manager.simulation.scenario import Scenario, World
    from ullage.units import parse_bytes, parse_duration

    shown = {param.name: param.show_default for param in all_commands().commands["simulate"].params}
    world = World()
    for name in ("startup", "monitor_delay"):
        assert parse_duration(shown[name]) == getattr(world, f"{name}_s")
    assert parse_bytes(shown["fragmentation"]) == world.fragmentation
    assert shown["min_speed"] == "any speed" and Scenario(gpus="H200").min_speed is None
