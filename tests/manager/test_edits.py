"""Editing jobs that wait, putting jobs into the queue again, and trying submissions out."""

import contextlib
import json
import re
import sqlite3
import sys

import pytest

from ullage.errors import InvalidValue, NoDaemon
from ullage.manager.client import Client

GIB = 1 << 30


def causes(job):
    return [attempt["cause"] for attempt in job["attempts"]]


def test_a_waiting_job_gets_other_values(common):
    number = str(common.script("true", hold=True, memory=2 * GIB))
    values = "--priority 5 --memory 3GiB --gpus 2 --time-limit 90m --begin now+2h --retries 2 --exclusive"
    common.cli("edit", number, "--name", "x y", *values.split())
    job = common.client.status(number)
    changed = {
        name: job[name] for name in ("priority", "promise", "gpus", "time_limit", "name", "retries", "exclusive")
    }
    assert changed == {
        "priority": 5,
        "promise": 3 * GIB,
        "gpus": 2,
        "time_limit": 5400.0,
        "name": "x y",
        "retries": 2,
        "exclusive": True,
    }
    assert job["state"] == "held" and job["memory"] == 3 * GIB and job["begin"]
    said = common.cli("edit", "x y", "--time-limit", "none", "--begin", "none", "--shared")
    assert said == f"job {number} is edited: begin, exclusive, time_limit\n"
    job = common.client.status(number)
    assert (job["time_limit"], job["begin"], job["exclusive"]) == (None, None, False)
    common.client.release(number)
    assert common.wait(int(number))["state"] == "done"
    kinds = [event["kind"] for event in common.client.events() if event["job"] == int(number)]
    assert kinds.count("edited") == 2


def test_an_edited_job_is_placed_by_its_new_values(common):
    blocker = common.submit(proceed="proceed", gpus=2, exclusive=True)
    common.wait(blocker, "running")
    low, high = (common.script("echo $ULLAGE_JOB_ID >> order", gpus=2, exclusive=True) for _ in range(2))
    common.client.edit(high, priority=5)
    after = common.script("true", gpus=2)
    common.until(lambda: "GPU" in common.job(after)["reason"], "a reason")
    common.client.edit(after, after=[high], memory=30 * GIB)
    common.until(lambda: common.job(after)["reason"] == f"waits for job {high}", "the new reason")
    common.go()
    assert {common.wait(number)["state"] for number in (blocker, low, high, after)} == {"done"}
    assert (common.work / "order").read_text().split() == [str(high), str(low)]
    assert common.job(after)["attempts"][0]["promise"] == 30 * GIB
    (common.work / "proceed").unlink()


def test_running_and_finished_jobs_are_not_edited(common):
    number = common.submit(proceed="never")
    common.wait(number, "running")
    said = common.cli("edit", str(number), "--priority", "3", code=1)
    assert said == (
        f"ullage: job {number}: cannot edit: the job must be waiting, but it is running; "
        f"'ullage edit --requeue --hold {number}' stops it first\n"
    )
    common.client.cancel(number)
    common.wait(number)
    assert "must be waiting, but it is cancelled\n" in common.cli("edit", str(number), "--priority", "3", code=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": 3}, "the job asks for 3 GPUs; there are 2"),
        ({"memory": "900GiB"}, "the job asks for 900 GiB of GPU memory; the largest GPU has"),
        ({"priority": 10**6}, "priority: input should be less than or equal to 1000"),
        ({"time_limit": "soon"}, "time_limit: duration must look like"),
        ({"after": ["nobody"]}, "no job 'nobody'"),
        ({"throttle": 3}, "throttle: only an array has one"),
        ({"retries": 2, "requeue": False}, "requeue: a job that is never started twice cannot have retries too"),
        ({"prioritty": 3}, "cannot edit 'prioritty'; did you mean 'priority'?"),
        ({"command": ["rm"]}, "cannot edit 'command'; there are name, "),
        ({}, "an edit must change at least one of name, "),
    ],
)
def test_impossible_edits_are_refused_and_change_nothing(common, changes, said):
    number = common.script("true", hold=True)
    before = common.job(number)
    try:
        [answer] = common.client.edit(number, **changes)
        assert not answer["done"]
        text = answer["text"]
    except InvalidValue as error:
        text = str(error)
    assert said in text
    after = common.job(number)
    assert {**after, "waited": 0} == {**before, "waited": 0}
    common.client.cancel(number)


def test_an_array_is_edited_as_one_and_keeps_its_options(home):
    home.start()
    first = home.submit(["/bin/sh", "-c", "echo {index}"], array="1-12%1", hold=True, env={"WORD": "x"})
    assert "at most 1 of its jobs" in home.cli("status", f"{first}_1")
    answers = home.client.edit(f"{first}_all", time_limit="1h", throttle=4)
    assert len(answers) == 12 and all(answer["done"] for answer in answers)
    assert {(job["throttle"], job["time_limit"]) for job in home.client.jobs(f"{first}_all")} == {(4, 3600.0)}
    home.client.edit(f"{first}_7", time_limit=None)
    home.stop()
    with sqlite3.connect(home.folder / "manager/state.db") as database:
        specs = database.execute("SELECT count(DISTINCT spec_id) FROM jobs").fetchone()[0]
    assert specs == 2, "one for the array, one for the element that differs"
    home.start()
    assert home.client.status(f"{first}_7")["time_limit"] is None and home.client.status(f"{first}_8")["throttle"] == 4
    home.client.edit(f"{first}_8", throttle=None)
    assert home.client.status(f"{first}_7")["throttle"] is None
    home.client.release(f"{first}_all")
    assert {job["state"] for job in home.client.wait_all([f"{first}_all"], 60)} == {"done"}
    assert home.client.logs(f"{first}_7") == "7\n"


def test_memory_is_taken_back_and_estimated_again(home):
    home.options = ["--virtual", "2xA100-40GB"]
    home.settings += "[estimating]\ntimeout = 0.05\n"
    home.start()
    (home.work / "train.py").write_text("")
    number = home.submit(["python", "train.py"], begin="now+2h")
    assert home.job(number)["estimate"] == "as its submitter says"
    home.client.edit(number, memory=None)
    job = home.until(lambda: home.job(number)["estimate"] and home.job(number), "an estimate")
    assert job["promise"] is None and job["state"] == "queued" and "as its submitter says" not in job["estimate"]
    home.client.edit(number, memory="2GiB", begin=None)
    assert home.job(number)["promise"] == 2 * GIB


def test_a_finished_job_is_requeued_under_its_number(common):
    number = common.script("echo $WORD $ULLAGE_ATTEMPT_NUMBER; [ -e fixed ]", env={"WORD": "kept"}, memory=2 * GIB)
    first = common.wait(number)
    assert first["state"] == "failed"
    (common.work / "fixed").touch()
    assert common.cli("edit", "--requeue", str(number)).startswith(f"job {number} is in the queue again")
    job = common.wait(number)
    assert (job["state"], causes(job)) == ("done", ["failed by itself", "finished"])
    assert job["submitted"] > first["ended"] and job["promise"] == 2 * GIB
    assert common.client.logs(number, attempt=1) == "kept 1\n"
    assert "requeued" in [event["kind"] for event in common.client.events() if event["job"] == number]


def test_a_job_that_is_over_can_be_given_more_memory(common):
    number = common.script("[ $ULLAGE_PROMISED_BYTES -gt 3000000000 ]", memory=2 * GIB)
    first = common.wait(number)
    assert (first["state"], first["more_memory"]) == ("failed", 7 * GIB)
    assert "is in the queue again with 6.00 GiB" in common.cli("edit", "--requeue", str(number), "--memory", "6GiB")
    job = common.wait(number)
    assert (job["state"], job["memory"]) == ("done", 6 * GIB)
    assert [each["promise"] for each in job["attempts"]] == [2 * GIB, 6 * GIB]
    assert "the largest GPU has" in common.cli("edit", "--requeue", str(number), "--memory", "1TiB", code=1)
    running = common.submit(proceed="proceed")
    common.wait(running, "running")
    assert "the job must be over" in common.cli("edit", "--requeue", str(running), "--memory", "6GiB", code=1)
    common.go()


def test_a_running_job_is_stopped_and_waits_behind_the_others(common):
    number = common.submit(proceed="proceed", exclusive=True, gpus=2)
    common.wait(number, "running")
    other = common.submit(proceed="other", exclusive=True, gpus=2)
    [answer] = common.client.requeue(number)
    assert answer == {
        "job": number,
        "reference": str(number),
        "done": True,
        "text": "is being stopped and goes into the queue again",
    }
    common.wait(other, "running")
    assert causes(common.job(number)) == ["requeued"] and common.job(number)["state"] == "queued"
    common.go(), common.go("other")
    job = common.wait(number)
    assert (job["state"], causes(job)) == ("done", ["requeued", "finished"])
    (common.work / "proceed").unlink()


def test_a_running_job_is_stopped_and_held_to_be_edited(common):
    number = common.submit(proceed="never")
    common.wait(number, "running")
    common.client.requeue(number, hold=True)
    assert common.wait(number, "held")["attempts"][0]["cause"] == "requeued"
    common.client.edit(number, priority=2)
    common.client.cancel(number)
    assert common.wait(number)["state"] == "cancelled"


@pytest.mark.parametrize("point", ["stop-before-commit", "stop-decided", "stop-written", "over-before-commit"])
def test_a_requeue_of_a_running_job_survives_kill_9(home, point):
    home.start(crash_at=point)
    number = home.submit(proceed="proceed")
    home.wait(number, "running")
    home.until(home.log, "the job to begin")
    with contextlib.suppress(NoDaemon):
        home.client.requeue(number, hold=True)
    home.until(lambda: home.process.poll() is not None, f"the daemon to end at {point}")
    home.start()
    if point == "stop-before-commit":
        assert home.job(number)["state"] == "running", "what was not acknowledged did not happen"
        home.client.requeue(number, hold=True)
    assert causes(home.wait(number, "held")) == ["requeued"]
    home.go()
    home.client.release(number)
    assert causes(home.wait(number)) == ["requeued", "finished"]
    assert home.log() == [f"start {number} 1", f"start {number} 2", f"end {number} 2"]


def test_a_cancelled_job_that_is_being_stopped_is_not_requeued(common):
    number = common.script("trap '' TERM; touch there; while :; do sleep 0.05; done")
    common.until((common.work / "there").exists, "the job")
    common.client.requeue(number)
    common.client.cancel(number)
    [answer] = common.client.requeue(number)
    assert not answer["done"]
    job = common.wait(number)
    assert (job["state"], causes(job)) == ("cancelled", ["cancelled"])


def test_a_refused_requeue_gives_a_reason(common):
    held, once = common.script("true", hold=True), common.script("true", requeue=False)
    common.wait(once)
    answers = {answer["job"]: answer["text"] for answer in common.client.requeue(held, once)}
    assert answers == {
        held: "cannot requeue: it is already waiting (held)",
        once: "cannot requeue: it has --no-requeue; submit it again",
    }
    common.client.cancel(held)


def test_dependencies_are_requeued_first(common):
    needed = common.script("[ -e good ]")
    after = common.script("true", after=[needed])
    assert common.wait(after)["state"] == "cancelled"
    [answer] = common.client.requeue(after)
    assert answer["text"] == f"cannot requeue: job {needed}, which it needs, did not end well; requeue that first"
    (common.work / "good").touch()
    common.client.requeue(needed, hold=True)
    common.client.requeue(after)
    common.until(lambda: common.job(after)["reason"] == f"waits for job {needed}", "the reason")
    common.client.release(needed)
    assert common.wait(after)["state"] == "done"


def test_a_job_without_its_environment_gets_the_requesters_one(common):
    number = common.script("echo $WORD $SEED", env={"WORD": "first", "SEED": "7"})
    common.wait(number)
    [answer] = common.client.requeue(number, env={"WORD": "second"})
    assert answer["text"] == "is in the queue again; its environment was not kept, so it has yours, without SEED"
    common.wait(number)
    assert common.client.logs(number) == "second\n"


def test_a_requeued_array_job_has_its_own_environment(common):
    first = common.submit(
        ["/bin/sh", "-c", "echo $WORD; [ {index} = 1 ] || [ -e until ] || sleep 100"], array="1-2", env={"WORD": "kept"}
    )
    common.wait(first)
    [answer] = common.client.requeue(first, env={"WORD": "another"})
    assert answer["text"] == "is in the queue again"
    assert common.client.logs(common.wait(first)["id"]) == "kept\n"
    common.client.cancel(f"{first}_all")


def test_an_edit_leaves_no_variables_behind(home):
    home.start()
    number = home.script("true", hold=True, env={"SECRET": "swordfish"})
    home.client.edit(number, time_limit="1h")
    home.client.edit(number, retries=2)
    home.client.release(number)
    assert home.wait(number)["state"] == "done"
    home.stop()
    with sqlite3.connect(home.folder / "manager/state.db") as database:
        kept = [row[0] for row in database.execute("SELECT content FROM specs")]
    assert len(kept) == 1 and "swordfish" not in kept[0]


def test_a_dry_run_names_the_place_of_a_job_and_stores_nothing(common):
    common.until(lambda: not common.client.queue(), "the jobs of other tests to be over")
    before = common.client.ping()["last_event"]
    said = common.cli("submit", "--memory", "6GiB", "--gpus", "2", "--dry-run", "--", "true")
    assert said == "would start now on GPU 0, GPU 1\npromise 6.00 GiB (as its submitter says)\n"
    answer = json.loads(
        common.cli("submit", "--memory", "6GiB", "--array", "5-9%2", "--dry-run", "--json", "--", "true")
    )
    assert [start["index"] for start in answer["starts"]] == [5, 6] and answer["jobs"] == 5
    assert "at most 2 run at once" in answer["reason"]
    assert (
        common.client.dry_run(["true"], memory="1GiB", hold=True)["reason"]
        == "it is held until 'ullage edit --release'"
    )
    assert common.client.ping()["last_event"] == before and common.client.queue() == []
    gpus = common.client.gpus()
    assert [gpu["promised"] for gpu in gpus] == [0, 0] and [gpu["jobs"] for gpu in gpus] == [[], []]


def test_a_dry_run_says_why_a_job_would_wait_and_behind_whom(common):
    blocker = common.submit(proceed="proceed", gpus=2, memory=38 * GIB)
    common.wait(blocker, "running")
    first = common.submit(memory=30 * GIB)
    answer = common.client.dry_run(["true"], memory=20 * GIB)
    assert answer["starts"] == [] and answer["ahead"] == [first]
    assert answer["reason"].startswith("needs 20.0 GiB on a GPU; GPU ")
    answer = common.client.dry_run(["true"], memory=20 * GIB, priority=5)
    assert answer["ahead"] == []
    said = common.cli("submit", "--memory", "20GiB", "--dry-run", "--", "true")
    assert f"\nbefore it in the queue: {first}\n" in said
    assert common.client.dry_run(["true"], memory=GIB, after=[first])["reason"] == f"waits for job {first}"
    assert "at the earliest" in common.client.dry_run(["true"], memory=GIB, begin="now+1h")["reason"]
    common.go()
    common.wait(first), common.wait(blocker)
    (common.work / "proceed").unlink()
    failed = common.script("exit 1")
    common.wait(failed)
    reason = common.client.dry_run(["true"], memory=GIB, after=[failed])["reason"]
    assert reason == f"would be cancelled: job {failed}, which it needs, did not end well"
    with pytest.raises(InvalidValue, match="asks for 3 GPUs; there are 2"):
        common.client.dry_run(["true"], memory=GIB, gpus=3)


def test_a_dry_run_says_where_jobs_start_and_who_stands_behind(common):
    first = common.submit(proceed="first", gpus=2, memory=20 * GIB)
    common.wait(first, "running")
    waiting = common.submit(memory=25 * GIB)  # has room when the first ends
    common.until(lambda: common.job(waiting)["reason"], "a look at the queue")
    before = common.client.ping()["last_event"]
    answer = common.client.dry_run(["true"], memory=14 * GIB, gpus=2)
    assert [start["gpus"] for start in answer["starts"]] == [[0, 1]] and answer["starts"][0]["speed"] is None
    behind = common.client.dry_run(["true"], memory=30 * GIB, priority=9)
    assert (behind["starts"], behind["ahead"], behind["behind"]) == ([], [], [waiting])
    said = common.cli("submit", "--memory", "14GiB", "--gpus", "2", "--dry-run", "--", "true")
    assert "would start now on GPU 0, GPU 1\n" in said
    assert common.client.ping()["last_event"] == before
    common.go("first")
    common.wait(first), common.wait(waiting)


def test_a_dry_run_of_what_would_be_estimated_says_so(common):
    said = common.cli("submit", "--dry-run", "--estimator", "ullage", "--", "python", "train.py")
    assert said.startswith("would start now on GPU 0, alone\npromise unknown (not estimated yet)")


@pytest.mark.slow
def test_a_dry_run_can_wait_for_the_estimate(home):
    home.options = ["--virtual", "2xA100-40GB"]
    home.start()
    (home.work / "train.py").write_text("import torch\nkept = torch.ones(1 << 20, device='cuda')\n")
    said = home.cli("submit", "--dry-run", "--estimate-wait", "1m", "--", sys.executable, "train.py")
    assert re.fullmatch(r"would start now on GPU 0\npromise \d+ MiB \(estimated by ullage for A100-40GB\)\n", said)
    assert home.client.queue() == []
    assert home.client.ping()["estimates_pending"] == 0


def test_all_of_it_goes_over_the_api_too(home):
    home.options += ["--api", "0"]
    home.start()
    token = (home.folder / "run/api-token").read_text().strip()
    url = home.client.call("api")["url"]
    with Client(url=url, token=token) as manager:
        [number] = manager.submit(["sh", "-c", "echo $WORD"], cwd="/", memory="1GiB", hold=True, env={"WORD": "kept"})
        assert manager.edit(number, priority=3, name="other") == [
            {"job": number, "reference": str(number), "done": True, "text": "is edited: name, priority"}
        ]
        manager.release(number)
        assert manager.wait(number)["name"] == "other"
        assert manager.requeue(number)[0]["done"]
        assert manager.wait(number)["attempts"][-1]["number"] == 2
        assert manager.dry_run(["true"], cwd="/", memory="1GiB")["starts"][0]["promise"] == GIB
        assert not manager.edit(number, priority=3)[0]["done"]


def test_a_job_of_an_array_has_one_name_in_every_sentence(common):
    array = common.submit(proceed="go", array="3-4", memory=30 * GIB)
    names = [f"{array}_{index}" for index in (3, 4)]
    common.until(lambda: all(common.job(name)["state"] == "running" for name in names), "both to run")
    waiting = common.submit(memory=20 * GIB)
    after = common.submit(after=[names[1]], memory=GIB)
    new = "has just come"
    common.until(lambda: all(common.job(each)["reason"] != new for each in (waiting, after)), "a look at the queue")
    reason = common.job(waiting)["reason"]
    assert "will have room when job " in reason and any(f"when job {name} ends" in reason for name in names)
    assert (common.job(after)["reason"], common.job(after)["after"]) == (f"waits for job {names[1]}", [names[1]])
    assert common.cli("status", names[1]).startswith(f"job {names[1]}: ")
    assert common.cli("cancel", names[1]).startswith(f"job {names[1]} ")
    common.until(lambda: common.job(after)["detail"], "the end of what waited for it")
    assert common.job(after)["detail"] == f"job {names[1]}, which it needs, did not end well"
    common.go("go")
    common.wait(names[0]), common.wait(waiting)
