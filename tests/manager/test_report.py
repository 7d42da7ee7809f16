"""What jobs took, by user, day, name and GPU; and who sees what of it."""

import csv
import datetime
import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.cli.jobs import usage_table as table
from ullage.errors import InvalidValue
from ullage.manager.client import Client
from ullage.manager.core.report import BY, report_of, spans_of, visible
from ullage.manager.core.usage import EnergyMeter
from ullage.manager.identity import Caller
from ullage.manager.monitor.nvml import NvmlSource
from ullage.manager.monitor.sampling import Monitor
from ullage.manager.storage.records import AttemptRecord

sys.path.insert(0, str(Path(__file__).parent / "monitor"))
from fake_nvml import GIB, FakeGpu, FakeNvml  # noqa: E402

HOUR = 3600.0
NOON = datetime.datetime(2026, 11, 10, 12).timestamp()


def row(job=1, user="ann", begin=NOON, hours=1.0, **more):
    """An attempt as the database gives it."""
    values = {
        "job": job,
        "number": 1,
        "user": user,
        "name": "train",
        "slots": ("GPU-a",),
        "promise": 20 * GIB,
        "used": 10 * GIB,
        "started": begin,
        "placed": begin,
        "ended": begin + hours * HOUR,
        "elapsed": hours * HOUR,
        "cause": "finished",
        "cores": 2,
        "gpu_part": 0.5,
        "energy": 360_000.0 * hours,
        "waited": 60.0,
    }
    return {**values, **more}


def rows(*attempts, by=("user", "day"), since=NOON - 100 * HOUR, until=NOON + 100 * HOUR):
    spans = list(spans_of(attempts, since, until, now=until))
    return report_of(spans, by, {})


def test_a_row_says_what_the_jobs_of_a_user_took_on_a_day():
    found = rows(row(), row(job=2, hours=3.0, used=20 * GIB, waited=600.0), row(job=3, user="bob", energy=None))
    ann, bob = found["rows"]
    assert (ann["user"], ann["day"], ann["jobs"]) == ("ann", "2026-11-10", 2)
    assert (ann["gpu_hours"], ann["gpu_hours_by_part"], ann["core_hours"]) == (4.0, 2.0, 8.0)
    assert (ann["promised"], ann["used"]) == (20 * GIB, 17.5 * GIB), "means over time"
    assert ann["energy_j"] == pytest.approx(4 * 360_000.0)
    assert (ann["waited_median"], ann["waited_90"]) == (60.0, 600.0)
    assert (bob["energy_j"], bob["energy_known"]) == (None, 0.0)
    assert found["total"]["energy_known"] == pytest.approx(4 / 5)


def test_an_attempt_over_midnight_is_divided_and_counts_once():
    (first, second) = rows(row(begin=NOON, hours=16.0, cause="killed"), by=("day",))["rows"]
    assert (first["gpu_hours"], second["gpu_hours"]) == (12.0, 4.0)
    assert (first["energy_j"], second["energy_j"]) == pytest.approx((12 * 360_000.0, 4 * 360_000.0))
    assert (first["failures"], second["failures"]) == ({}, {"killed": 1})
    assert (first["waited_median"], second["waited_median"]) == (60.0, None)


def test_only_what_lies_between_the_times_counts():
    attempt = row(begin=NOON, hours=10.0, cause="killed")
    found = rows(attempt, since=NOON + 2 * HOUR, until=NOON + 5 * HOUR)["total"]
    assert (found["gpu_hours"], found["energy_j"]) == pytest.approx((3.0, 3 * 360_000.0))
    assert (found["failures"], found["waited_median"]) == ({}, None), "it began before and ended after"
    running = row(begin=NOON, ended=None, elapsed=None, cause=None, energy=None)
    assert rows(running, until=NOON + 5 * HOUR)["total"]["gpu_hours"] == 5.0, "until now"


def test_several_gpus_of_a_job_are_distinguished():
    found = rows(row(slots=("GPU-a", "GPU-b"), gpu_part=1.0), by=("gpu",))["rows"]
    assert [(each["gpu"], each["gpu_hours"], each["gpu_hours_by_part"]) for each in found] == [
        ("GPU-a", 1.0, 0.5),
        ("GPU-b", 1.0, 0.5),
    ]
    assert rows(row(slots=(), gpu_part=0.0, energy=None), by=("gpu",))["rows"][0]["gpu"] == "none"


def test_an_attempt_that_never_began_fails_and_takes_nothing():
    found = rows(row(started=None, elapsed=None, cause="not started", energy=None))["total"]
    assert (found["gpu_hours"], found["failures"]) == (0.0, {"not started": 1})


attempts = st.builds(
    row,
    job=st.integers(1, 5),
    user=st.sampled_from("ab"),
    begin=st.floats(NOON - 200 * HOUR, NOON + 200 * HOUR),
    hours=st.floats(0, 100),
    slots=st.sampled_from([(), ("GPU-a",), ("GPU-a", "GPU-b")]),
    energy=st.none() | st.floats(0, 1e6),
    cause=st.sampled_from(["finished", "killed", "time limit"]),
)


@given(st.lists(attempts, max_size=6), st.lists(st.sampled_from(BY), min_size=1, unique=True))
def test_the_rows_add_up_to_the_total_however_they_are_made(found, by):
    made = rows(*found, by=tuple(by))
    for name in ("gpu_hours", "gpu_hours_by_part", "core_hours"):
        assert sum(each[name] for each in made["rows"]) == pytest.approx(made["total"][name], abs=1e-6)
    assert sum(each["energy_j"] or 0.0 for each in made["rows"]) == pytest.approx(
        made["total"]["energy_j"] or 0.0, abs=1e-3
    )
    for cause in ("killed", "time limit"):
        told = [each["failures"].get(cause, 0) for each in made["rows"]]
        assert sum(told) == made["total"]["failures"].get(cause, 0)


def test_users_see_of_others_what_the_site_allows():
    spans = list(spans_of([row(), row(job=2, user="bob", name="secret")], 0.0, 2 * NOON, now=2 * NOON))

    def seen(others):
        return [(span.user, span.name) for span in visible(spans, "ann", others)]

    assert seen("own") == [("ann", "train")]
    assert seen("totals") == [("ann", "train"), ("others", "(others)")]
    assert seen("all") == [("ann", "train"), ("bob", "secret")]


def attempt(token, promise, slots=("GPU-a",)):
    return AttemptRecord(
        job=1, number=1, token=token, state="running", slots=slots, promise=promise, exclusive=False, placed=0.0
    )


def test_the_energy_of_a_gpu_is_divided_by_what_was_promised():
    moment = [0.0]
    meter = EnergyMeter(lambda: moment[0])
    both = [attempt("x", 30), attempt("y", 10)]
    for now in (0.0, 1.0, 2.0):
        moment[0] = now
        meter.look(both, {"GPU-a": 400.0}.get)
    moment[0] = 3.0
    meter.look(both[:1], {"GPU-a": 100.0}.get)
    assert meter.end("x") == pytest.approx(2 * 300.0 + 100.0)
    assert meter.end("y") == pytest.approx(2 * 100.0)
    assert meter.end("z") is None


def test_energy_that_was_not_watched_all_the_time_is_unknown():
    moment = [0.0]
    meter = EnergyMeter(lambda: moment[0])
    meter.interrupted("adopted")
    powers = iter([300.0, 300.0, None, 300.0])
    for now in range(4):
        moment[0], power = float(now), next(powers)
        meter.look([attempt("adopted", 1), attempt("gap", 1)], lambda slot, power=power: power)
    assert meter.end("adopted") is None and meter.end("gap") is None
    meter.look([attempt("short", 1)], lambda slot: None)
    assert meter.end("short") is None, "it was over before the power of its GPU was known"


@pytest.fixture
def on_nvml(make_here):
    """A daemon on one GPU that takes 300 W."""
    source = NvmlSource(FakeNvml([FakeGpu(uuid="GPU-a", total=81 * GIB, used=0)]))
    return make_here(monitor=Monitor(source, interval=0.1), placing={"smact_limit": "off"})


def test_an_attempt_keeps_its_energy_and_its_part_of_the_gpu(on_nvml):
    job = on_nvml.submit("sleep 2.5", memory=20 * GIB)
    done = on_nvml.until_over(job)["attempts"][0]
    assert 0 < done["energy"] <= 300.0 * (done["elapsed"] + 5.0)
    assert done["gpu_part"] == pytest.approx(20 / 80)
    found = on_nvml.call("report", by=["gpu"])
    assert found["rows"][0]["gpu"].startswith("0 ") and found["rows"][0]["energy_j"] == pytest.approx(done["energy"])


def ask_as(here, who, operator=False, **arguments):
    return here.call_as(Caller(4242, 4242, who, operator), "report", arguments)


def test_a_user_sees_no_other_user_by_default(make_here):
    here = make_here()
    here.until_over(here.submit("true"))
    owner = here.job(1)["user"]
    assert ask_as(here, "stranger")["rows"] == []
    assert ask_as(here, "stranger", user=owner)["rows"] == []
    assert [each["user"] for each in ask_as(here, "boss", operator=True)["rows"]] == [owner]
    here.close()
    here = make_here(access={"report": "totals"})
    assert [each["user"] for each in ask_as(here, "stranger", by=["user"])["rows"]] == ["others"]


def test_the_report_as_a_table_csv_and_json(common):
    common.wait(common.script("true", name="<b>&good"))
    common.wait(common.script("exit 3", name="bad"))
    shown = common.cli("report", "--by", "user,name")
    assert "GPU hours" in shown and "failed by itself: 1" in shown and "total" in shown
    made = json.loads(common.cli("report", "--by", "name", "--json"))
    assert {each["name"] for each in made["rows"]} >= {"<b>&good", "bad"}
    as_csv = list(csv.DictReader(io.StringIO(common.cli("report", "--by", "name", "--csv"))))
    assert {each["name"]: each["failures"] for each in as_csv}["bad"] == "failed by itself: 1"
    nothing = common.cli("report", "--since", "2020-01-01", "--until", "2020-02-01")
    assert nothing == "no jobs ran from 2020-01-01 00:00 to 2020-02-01 00:00\n"


def test_a_narrow_terminal_gets_whole_words_and_fewer_columns():
    found = rows(row(cores=0), row(job=2, user="bob", cores=0, cause="killed")) | {"by": ["user", "day"]}
    wide, narrow = table(found, None).splitlines(), table(found, 60).splitlines()
    assert "by part" in wide[0] and "energy" in wide[0] and "core hours" not in wide[0], "nobody asked for cores"
    assert all(len(line) <= 70 and "…" not in line for line in narrow)
    assert "GPU hours" in narrow[0] and "energy" not in narrow[0] and "no room for energy" in " ".join(narrow)
    assert "    killed: 1" in narrow


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--by", "usr"], "by must be one or more of user, day, name and gpu, each once, got 'usr'"),
        (["--since", "soon"], "2026-11-01T08:00, or 7d for seven days ago, got 'soon'"),
        (["--since", "1h", "--until", "2h"], "the time to report from must be before the time to report until"),
        (["--csv", "--json"], "--csv and --json exclude each other"),
    ],
)
def test_mistakes_are_one_message(common, words, message):
    assert message in common.cli("report", *words, code=2)


def test_the_report_over_http_is_the_same(home):
    home.options += ["--api", "0"]
    home.start()
    home.wait(home.script("true"))
    where = home.client.call("api")
    with Client(url=where["url"], token=where["token"]) as remote:
        until = home.client.report()["until"]
        assert remote.report(["name", "day"], until=until) == home.client.report(["name", "day"], until=until) | {
            "since": pytest.approx(until - 7 * 86400, abs=60)
        }
        with pytest.raises(InvalidValue, match="each once"):
            remote.report(["day", "day"])
        assert remote.trace(0.0, until) == home.client.trace(0.0, until), "and so is what is simulated again"
