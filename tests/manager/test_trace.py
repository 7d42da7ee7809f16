"""What a daemon ran is told job by job to those who may see it, and can be simulated again."""

import contextlib
import json
import sqlite3
import sys
from pathlib import Path

import pytest

import ullage
import ullage.manager
import ullage.manager.simulation
from ullage.errors import InvalidValue, UllageError
from ullage.manager.core.export import stored_trace
from ullage.manager.identity import Caller
from ullage.manager.monitor.nvml import NvmlSource
from ullage.manager.monitor.sampling import Monitor
from ullage.manager.simulation.history import as_it_was, trace_of_history
from ullage.manager.simulation.reading import read_trace

sys.path.insert(0, str(Path(__file__).parent / "monitor"))
from fake_nvml import GIB, FakeGpu, FakeNvml  # noqa: E402


def ask_as(here, who, operator=False, **arguments):
    return here.call_as(Caller(4242, 4242, who, operator), "trace", arguments)


def on_h200(make_here, **settings):
    source = NvmlSource(FakeNvml([FakeGpu(uuid="GPU-a", used=0)]))
    return make_here(monitor=Monitor(source, interval=0.1), placing={"smact_limit": "off"}, **settings)


def test_recorded_jobs_can_be_simulated_again(make_here):
    here = on_h200(make_here)
    jobs = [here.submit("sleep 0.6", memory=20 * GIB), here.submit("exit 3", memory=30 * GIB)]
    waiting = here.submit("true", memory=GIB, hold=True)
    for job in jobs:
        here.until_over(job)
    told = here.call("trace")
    assert [job["id"] for job in told["jobs"]] == [*jobs, waiting]
    assert (told["policy"], told["sharing"], told["all"]) == ("ullage", "time-slicing", True)
    assert told["gpus"] == [{"id": "GPU-a", "index": 0, "name": "NVIDIA H200", "total": 139 * GIB, "mig": False}]
    found = trace_of_history(told)
    assert [job.id for job in found.jobs] == jobs and "1 job is left out: not over" in found.notes
    assert 0.3 < found.jobs[0].work_s < 60.0
    assert [job.kind.estimates for job in found.jobs] == [{"promised": 20 * GIB}, {"promised": 30 * GIB}]
    real = as_it_was(told)
    assert (real.figures.done, real.figures.failed) == (1, 1)
    was, again = ullage.manager.simulation.replay(told, policy="exclusive", gpus="2xH200")
    assert was.figures == real.figures and again.figures.done == 2
    assert (again.scenario.policy, again.scenario.gpus, again.scenario.estimator) == ("exclusive", "2xH200", "promised")
    with pytest.raises(InvalidValue, match="before the time to report until"):
        here.call("trace", since=2.0, until=1.0)
    assert here.call("trace", since=0.0, until=told["since"])["jobs"] == []
    later = max(here.job(job)["ended"] for job in jobs) + 0.001
    assert here.call("trace", since=later)["jobs"] == []
    assert [job["id"] for job in here.call("trace", since=later, there=True)["jobs"]] == [waiting]


def test_a_stopped_daemons_database_gives_the_same_trace(make_here, tmp_path):
    here = on_h200(make_here, policy="magm")
    here.until_over(here.submit("sleep 0.3", memory=20 * GIB))
    told = here.call("trace")
    here.close()
    folder = here.daemon.context.folder
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.glob("state.db*")}
    for place in (folder.parent, folder, folder / "state.db"):
        found = stored_trace(place, told["since"], told["until"])
        assert found == told
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.glob("state.db*")} == before
    assert stored_trace(folder, until=told["since"])["jobs"] == []
    with pytest.raises(InvalidValue, match="must be the database of a daemon, state.db"):
        stored_trace(tmp_path / "nothing")
    with contextlib.closing(sqlite3.connect(folder / "state.db")) as older, older:
        older.execute("DELETE FROM site")
    with pytest.raises(InvalidValue, match="did not keep the GPUs"):
        stored_trace(folder)
    (tmp_path / "state.db").write_text("this is no database, however long it may be " * 99)
    with pytest.raises(UllageError, match="is damaged"):
        stored_trace(tmp_path / "state.db")


def test_a_user_sees_jobs_of_others_only_if_the_site_allows(make_here):
    here = on_h200(make_here)
    here.until_over(here.submit("true", memory=GIB, name="secret"))
    owner = here.job(1)["user"]
    hidden = ask_as(here, "stranger")
    assert (hidden["jobs"], hidden["works"], hidden["all"]) == ([], {}, False)
    assert [each["user"] for each in ask_as(here, "boss", operator=True)["jobs"]] == [owner]
    here.close()
    here = on_h200(make_here, access={"report": "totals"})
    [seen] = ask_as(here, "stranger")["jobs"]
    assert (seen["user"], seen["name"]) == ("others", "(others)")


def test_the_command_compares_history_and_simulation(common):
    """One daemon and one set of jobs for all that the command does."""
    nothing = common.cli("simulate", "--from-history", code=2)
    assert "no jobs that ran on a GPU have ended since" in nothing
    common.wait(common.script("sleep 0.5", name="first"))
    common.wait(common.script("sleep 0.5", name="second"))
    shown = common.cli("simulate", "--from-history", "--policy", "exclusive,magm", "--gpus", "2xA100-40GB")
    lines = [line.split("  ")[0] for line in shown.splitlines()]
    assert lines[1:5] == ["as it was", "simulated as it was", "exclusive", "magm"]
    assert "of 2 jobs the work is unknown: each is assumed to keep a GPU busy all the time" in shown
    told = json.loads(common.cli("simulate", "--from-history", "--since", "1h", "--json"))
    real, again = (run["figures"] for run in told["runs"])
    assert (real["done"], again["done"]) == (2, 2) and told["notes"]
    assert told["runs"][1]["scenario"]["estimator"] == "promised"
    common.cli("simulate", "--from-history", "--save-history", "history.json")
    kept = json.loads(common.cli("simulate", "history.json", "--json"))
    assert [run["figures"]["total_s"] for run in kept["runs"]] == pytest.approx([real["total_s"], again["total_s"]])
    assert read_trace(common.work / "history.json").jobs[0].kind.name == "first"
    own = json.loads((common.work / "history.json").read_text()) | {"policy": "their_policy.py:choose"}
    (common.work / "own.json").write_text(json.dumps(own))
    assert "name your copy: --policy their_policy.py:choose" in common.cli("simulate", "own.json", code=2)
    others = common.cli("simulate", "own.json", "--policy", "magm,ullage")
    assert [line.split("  ")[0] for line in others.splitlines()[1:4]] == ["as it was", "magm", "ullage"]
    assert "to see that simulated as well, name your copy: --policy their_policy.py:choose" in others
    assert "x.csv and --from-history exclude each other" in common.cli("simulate", "x.csv", "--from-history", code=2)
    [database] = common.folder.rglob("state.db")
    stored = json.loads(common.cli("simulate", "--from-history", "--database", str(database), "--json"))
    assert [run["figures"]["total_s"] for run in stored["runs"]] == pytest.approx([real["total_s"], again["total_s"]])
    assert "--database works only with --from-history" in common.cli("simulate", "x.csv", "--database", "x", code=2)
    assert "got 'soon'" in common.cli("simulate", "--from-history", "--since", "soon", code=2)
