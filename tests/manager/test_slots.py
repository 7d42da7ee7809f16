"""Time slots lose no work: who is asked to save itself, how long that may take, and for whom a job has to leave."""

import os
import signal
import sys
import time

import pytest

# Trains for ever; saves itself when asked, by a handler as training scripts have them. The second attempt ends.
TRAIN = """
import os, signal, sys, time
how = sys.argv[1]
def note(text):
    with open("attempts.log", "a") as file:
        file.write(text + "\\n")
def save(number, frame):
    if how == "slowly":
        end = time.monotonic() + 4  # longer than its lead
        with open("checkpoint", "wb") as file:
            while time.monotonic() < end:
                file.write(bytes(2 << 20)); file.flush()
                time.sleep(0.1)
    note(f"saved by {'the trainer' if os.getpid() == trainer else 'somebody else'}")
    os._exit(int(os.environ["ULLAGE_CHECKPOINT_EXIT"]))
trainer = os.getpid()
signal.signal(getattr(signal, "SIGTERM" if how == "on SIGTERM" else "SIGUSR1"), save)
if os.environ["ULLAGE_ATTEMPT_NUMBER"] != "1":
    note("resumed")
    sys.exit(0)
if how == "named":
    signal.signal(signal.SIGUSR1, lambda *_: note("the wrong one was asked"))
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    trainer = os.getpid()
    signal.signal(signal.SIGUSR1, save)
    open(os.environ["ULLAGE_CHECKPOINT_PID_FILE"], "w").write(str(trainer))
elif os.fork() == 0:
    os.setsid()  # a worker, with the handler of the trainer
open("there", "w").close()
while True:
    time.sleep(0.02)
"""


@pytest.fixture
def slots(home):
    home.options = ["--virtual", "1xA100-40GB", "--estimator", "none"]
    home.settings += '[fairness]\nslot = "1s"\ncheckpoint_lead = "1s"\n'
    return home


def train(home, how, around="{}", **more):
    (home.work / "train.py").write_text(TRAIN)
    command = around.format(f"{sys.executable} train.py '{how}'")
    more = {"resumable": True, "exclusive": True, "env": {"PATH": os.environ["PATH"]}, **more}
    number = home.submit(["/bin/bash", "-c", command], **more)
    home.until((home.work / "there").exists, "the job")
    return number


@pytest.mark.parametrize(
    ("how", "around"),
    [
        ("at once", "exec {}"),
        ("at once", "{}; true"),
        ("at once", "trap 'echo bye' EXIT; {}; exit $?"),
        ("slowly", "{}; exit $?"),
        ("named", "{}; exit $?"),
    ],
)
def test_the_one_who_can_save_is_asked_and_has_the_time_for_it(slots, how, around):
    slots.start()
    number = train(slots, how, around, checkpoint_lead=3.0 if how == "slowly" else 60.0)
    other = slots.script("true", exclusive=True)
    assert slots.wait(other)["state"] == "done"
    job = slots.wait(number)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["time slot ended", "finished"], job
    assert slots.log() == ["saved by the trainer", "resumed"]


def test_a_job_that_keeps_writing_has_only_the_sites_grace_time(slots):
    slots.settings += 'checkpoint_extension = "1s"\n'
    slots.start()
    script = "trap : USR1; touch there; while :; do dd if=/dev/zero of=big bs=1M count=8 conv=notrunc 2>/dev/null; done"
    number = slots.script(script, resumable=True, exclusive=True)
    slots.until((slots.work / "there").exists, "the job")
    assert slots.wait(slots.script("true", exclusive=True))["state"] == "done"
    assert slots.job(number)["attempts"][0]["cause"] == "time slot ended"


def test_a_job_without_signal_handler_survives_the_save_signal(slots):
    slots.start()
    number = slots.script("touch there; while [ ! -e proceed ]; do sleep 0.05; done", resumable=True, exclusive=True)
    slots.until((slots.work / "there").exists, "the job")
    assert slots.wait(slots.script("true", exclusive=True))["state"] == "done"
    first = slots.job(number)["attempts"][0]
    assert first["signal"] == signal.SIGTERM and "no process of it handled the signal" in first["detail"]
    told = [event for event in slots.client.call("events")["events"] if event["kind"] == "no checkpoint"]
    assert [event["job"] for event in told] == [number]


def test_no_job_makes_way_for_a_dependent_or_unsuited_one(slots):
    slots.start()
    fixed = slots.submit(proceed="proceed", memory=20 << 30)
    number = train(slots, "at once", exclusive=False, memory=4 << 30)
    waiting = [slots.script("true", after=number, exclusive=True), slots.submit(memory=30 << 30)]
    for _ in range(3):  # several passes over the queue after its slot
        slots.wait(slots.script("true", memory=1 << 30))
    slots.until(lambda: slots.job(number)["ran"] > 3.0, "its slot to be long over")
    assert slots.job(number)["state"] == "running" and len(slots.job(number)["attempts"]) == 1
    assert [slots.job(each)["state"] for each in waiting] == ["queued", "queued"]
    fitting = slots.submit(memory=16 << 30)
    assert slots.wait(fitting)["state"] == "done", "for one who fits there it does leave"
    assert slots.wait(number)["attempts"][0]["cause"] == "time slot ended"
    slots.go()
    assert {slots.wait(each)["state"] for each in (fixed, *waiting)} == {"done"}


def test_one_who_waits_makes_one_leave(slots):
    slots.options = ["--virtual", "2xA100-40GB", "--estimator", "none"]
    slots.start()
    saving = "trap 'while [ ! -e proceed ]; do sleep 0.05; done; exit 85' USR1; touch $ULLAGE_JOB_ID; "
    saving += "while [ ! -e proceed ]; do sleep 0.05; done"
    long = [slots.script(saving, resumable=True, exclusive=True, checkpoint_lead=60.0) for _ in range(2)]
    slots.until(lambda: all((slots.work / str(number)).exists() for number in long), "both")
    waiting = slots.script("true", exclusive=True)

    def states():
        return sorted(slots.job(number)["state"] for number in long)

    slots.until(lambda: "stopping" in states(), "one to leave")
    for _ in range(3):  # each makes the daemon take a step
        slots.client.call("cancel", jobs=[slots.script("true", hold=True)])
        slots.until(lambda: slots.job(waiting)["reason"], "a pass over the queue")
    assert states() == ["running", "stopping"]
    slots.go()
    assert {slots.wait(number)["state"] for number in (waiting, *long)} == {"done"}


def test_cancelling_a_shell_leaves_its_program_time_to_save(served):
    served.kill()
    served.settings = "[running]\ngrace = 30.0\n"
    served.start()
    number = train(served, "on SIGTERM", "{}; true", resumable=False)
    served.client.call("cancel", jobs=[number])
    assert served.wait(number)["state"] == "cancelled"
    assert "saved by the trainer" in served.log()


def test_time_is_counted_once_over_several_attempts(home):
    home.options = ["--virtual", "1xA100-40GB", "--estimator", "none"]
    home.start()
    script = "if [ ! -e was ]; then touch was; sleep 2; kill -KILL $$; fi; while [ ! -e proceed ]; do sleep 0.05; done"
    number = home.script(script)
    home.until(lambda: [a["state"] for a in home.job(number)["attempts"]] == ["over", "running"], "a second attempt")
    job = home.job(number)
    assert job["ran"] <= job["attempts"][0]["elapsed"] + time.time() - job["attempts"][1]["started"]
