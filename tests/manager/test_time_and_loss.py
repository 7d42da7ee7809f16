"""Time slots and checkpoints, a clock that is moved, a GPU that is lost, limits of host memory."""

from ullage.manager.running.cgroups import Cgroups

SAVING = """
echo "start $ULLAGE_JOB_ID $ULLAGE_ATTEMPT_NUMBER" >> attempts.log
trap 'echo saved >> attempts.log; exit $ULLAGE_CHECKPOINT_EXIT' USR1
[ -e saved ] && exit 0
touch saved
while :; do sleep 0.05; done
"""


def test_a_slot_ends_with_a_checkpoint_and_the_job_resumes_last(home):
    home.options = ["--virtual", "1xA100-40GB", "--estimator", "none"]
    home.settings += '[fairness]\nslot = "1s"\ncheckpoint_lead = "30s"\n'
    home.start()
    long = home.script(SAVING, exclusive=True, resumable=True)
    home.until((home.work / "saved").exists, "the long job")
    other = home.script('echo "start $ULLAGE_JOB_ID 1" >> attempts.log', exclusive=True)
    assert home.wait(other)["state"] == "done"
    job = home.wait(long)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["time slot ended", "finished"]
    assert home.log() == [f"start {long} 1", "saved", f"start {other} 1", f"start {long} 2"]


def test_a_slot_ends_only_for_waiting_and_resumable_jobs(home):
    home.options = ["--virtual", "1xA100-40GB", "--estimator", "none"]
    home.settings += '[fairness]\nslot = "100ms"\ncheckpoint_lead = "0s"\n'
    home.start()
    alone = home.submit(proceed="proceed", resumable=True)
    home.wait(alone, "running")
    fixed = home.submit(proceed="proceed", memory=38 << 30)
    home.wait(fixed, "running")
    waiting = home.submit(memory=1 << 30, exclusive=True)
    home.until(
        lambda: home.job(alone)["state"] == "queued" or home.job(alone)["attempts"][0]["cause"], "the slot's end"
    )
    assert home.job(fixed)["state"] == "running" and len(home.job(fixed)["attempts"]) == 1
    home.go()
    assert {home.wait(number)["state"] for number in (alone, fixed, waiting)} == {"done"}


def test_a_job_gets_a_signal_before_its_time_limit(served):
    number = served.script(SAVING, resumable=True, time_limit=32.0, checkpoint_lead=30.0)
    job = served.wait(number)
    assert job["cause"] == "time limit" and job["exit_code"] == 85 and "saved" in served.log()


DAY = 86400.0
WAIT = "touch there; while [ ! -e proceed ]; do sleep 0.05; done"


def test_a_clock_that_is_moved_changes_no_job(make_here, home):
    here = make_here(fairness={"slot": 3600.0})

    def state(number):
        return here.call("status", job=number)[0]["state"]

    running = here.submit(WAIT, resumable=True, exclusive=True, time_limit=3600.0)
    home.until((here.folder / "work/there").exists, "the job")
    waiting = here.submit("true", exclusive=True)
    for moved in (10 * DAY, -10 * DAY, 3650 * DAY, 0.0):
        here.moved = moved
        here.daemon._loop.call_soon_threadsafe(here.daemon.context.service.wake)
        later = here.submit("true", hold=True)
        assert state(running) in ("starting", "running") and state(waiting) == "queued"
        here.call("cancel", jobs=[later])
    here.moved = -10 * DAY
    (here.folder / "work/proceed").touch()
    home.until(lambda: state(waiting) == "done" and state(running) == "done", "both to end")
    for job in here.call("history"):
        assert job["waited"] >= 0 and job["ran"] >= 0 and job["completion"] >= 0
    assert [len(here.call("status", job=number)[0]["attempts"]) for number in (running, waiting)] == [1, 1]


def test_retention_deletes_only_old_finished_jobs(make_here):
    here = make_here()
    old = here.submit("echo old", exclusive=True)
    here.until_over(old)
    running = here.submit(f"echo begun; {WAIT}; echo ended", exclusive=True)
    here.until((here.folder / "work/there").exists, "the running job")
    waiting, held = here.submit("echo late", exclusive=True), here.submit("true", hold=True, env={"WORD": "kept"})
    here.close()

    here = make_here(moved=100 * DAY, running={"keep_days": 90})
    kept = [running, waiting, held]
    assert here.call("status", job=old)[0]["state"] == "done", "that it was there, and how it ended, stays known"
    here.until(lambda: not (here.folder / f"manager/jobs/{old}").exists(), "the old job's files to go")
    assert here.call("logs", job=old)["text"] == ""
    assert [here.call("status", job=number)[0]["state"] for number in kept] == ["running", "queued", "held"]
    assert here.call("logs", job=running)["text"] == "begun\n"
    told = {event["job"] for event in here.call("events")["events"]}
    assert told.issuperset(kept) and old not in told
    later = here.submit("echo later", hold=True)
    (here.folder / "work/proceed").touch()
    here.until_over(waiting)
    assert here.call("logs", job=running)["text"] == "begun\nended\n"
    assert here.call("logs", job=waiting)["text"] == "late\n"
    assert here.daemon.context.store.job(held).spec["asked"]["env"] == {"WORD": "kept"}
    here.call("cancel", jobs=[held, later])
    here.close()

    here = make_here(moved=150 * DAY, running={"keep_days": 90})
    assert (here.folder / f"manager/jobs/{waiting}").exists(), "50 days are less than 90"


def test_a_lost_gpu_gets_no_job_and_its_job_is_tried_elsewhere(served):
    script = "if [ ! -e was-there ]; then touch was-there; while [ ! -e proceed ]; do sleep 0.05; done; exit 1; fi"
    number = served.script(script, exclusive=True)
    served.until((served.work / "was-there").exists, "the job")
    place = served.job(number)["gpus_used"][0]
    index = next(gpu["index"] for gpu in served.client.call("gpus") if gpu["id"] == place)
    (served.folder / f"cards/serve/card-{index}").unlink()
    served.until(lambda: served.client.call("gpus")[index]["lost"], "the loss to be seen")
    assert served.job(number)["state"] == "running", "what runs is left alone"
    other = served.wait(served.script("true"))
    assert place not in other["attempts"][0]["slots"]
    served.go()
    job = served.wait(number)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["GPU lost", "finished"]
    assert job["attempts"][1]["slots"] != [place]


def test_a_host_memory_limit_is_a_cgroup_if_the_system_allows(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    groups = Cgroups(root=tmp_path, own=tmp_path)
    assert groups.available
    made = groups.make("token", 1 << 30, cores=2)
    assert (tmp_path / "ullage-jobs/token/cpu.max").read_text() == "200000 100000"
    assert (tmp_path / "ullage-jobs/token/memory.max").read_text() == str(1 << 30)
    assert made == str(tmp_path / "ullage-jobs/token")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"


def test_without_cgroups_the_reason_is_known(tmp_path):
    groups = Cgroups(root=tmp_path)
    assert not groups.available and groups.why == "this system has no cgroup v2" and groups.make("t", 1) is None


def test_a_removed_wake_socket_is_made_again(served):
    file = served.folder / "run/wake.sock"
    file.unlink()
    served.until(file.exists, "it to be made again")
    assert served.wait(served.script("true"))["state"] == "done"
