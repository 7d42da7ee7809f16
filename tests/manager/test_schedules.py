"""What a job says about when and how often it runs: retries, start times, throttled arrays."""

import re
import time

import pytest

HOUR = 3600.0
FAILS_TWICE = """
echo "start $ULLAGE_JOB_ID $ULLAGE_ATTEMPT_NUMBER" >> attempts.log
[ "$ULLAGE_ATTEMPT_NUMBER" -ge 3 ]
"""


def causes(job):
    return [attempt["cause"] for attempt in job["attempts"]]


def test_a_failed_job_is_retried_as_often_as_requested(common):
    good, bad, never = (common.script(FAILS_TWICE, retries=retries) for retries in (2, 1, 0))
    assert common.wait(good)["state"] == "done" and causes(common.job(good)) == ["failed by itself"] * 2 + ["finished"]
    job = common.wait(bad)
    assert (job["state"], job["exit_code"], causes(job)) == ("failed", 1, ["failed by itself"] * 2)
    assert job["detail"] == "exit code 1; no retry is left of 1"
    assert causes(common.wait(never)) == ["failed by itself"]


def test_retries_are_counted_across_a_restart(home):
    home.start()
    number = home.script(FAILS_TWICE, retries=2)
    home.until(lambda: len(home.log()) >= 2, "the second attempt")
    home.kill()
    home.start()
    assert home.wait(number)["state"] == "done"
    assert home.log() == [f"start {number} {attempt}" for attempt in (1, 2, 3)]


def test_a_start_once_job_stays_down_without_its_supervisor(home):
    home.start(crash_at="supervisor-recorded")
    number = home.submit(requeue=False)
    job = home.wait(number)
    assert (job["state"], causes(job)) == ("failed", ["watching process lost"])
    assert job["detail"] == "the process that watched it was killed; it has --no-requeue"


def test_a_start_once_job_has_one_attempt_whatever_its_end(common):
    out_of_memory = 'echo "torch.OutOfMemoryError: CUDA out of memory." >&2; exit 1'
    for script, cause in (
        (out_of_memory, "out of GPU memory"),
        ("kill -9 $$", "killed"),
        ("exit 3", "failed by itself"),
    ):
        job = common.wait(common.script(script, requeue=False))
        assert (job["state"], causes(job)) == ("failed", [cause]) and "it has --no-requeue" in job["detail"]


def test_job_that_was_not_begun_before_a_crash_is_started_once(home):
    home.start(crash_at="placed")
    number = home.submit(requeue=False)
    home.until(lambda: home.process.poll() is not None, "the crash")
    home.start()
    assert home.wait(number)["state"] == "done"
    assert home.log() == [f"start {number} 2", f"end {number} 2"]


def test_contradictions_are_refused(common):
    said = common.cli("submit", "--retries", "2", "--no-requeue", "--", "true", code=2)
    assert said == "ullage: the job: requeue: a job that is never started twice cannot have retries too\n"


def test_a_job_starts_at_its_time_also_after_a_restart(make_here):
    here = make_here()
    moment = time.time() + 2 * HOUR
    number = here.submit("echo late", begin=moment)
    here.until(lambda: "at the earliest" in here.job(number)["reason"], "the reason")
    assert here.job(number)["reason"] == time.strftime(
        "starts at %Y-%m-%d %H:%M:%S at the earliest", time.localtime(moment)
    ).replace(":00 at", " at")
    here.close()
    here = make_here(moved=-5 * HOUR)
    here.until(lambda: "at the earliest" in here.job(number)["reason"], "the reason, with a clock that was set back")
    here.moved = HOUR
    here.until_over(here.submit("true"))
    assert here.job(number)["state"] == "queued"
    here.moved = 3 * HOUR
    assert here.until_over(number)["state"] == "done"


def test_start_times_are_given_as_people_write_them(common):
    common.cli("submit", "--memory", "1GiB", "--name", "later", "--begin", "now+2h", "--", "true")
    found = common.client.status("later")
    assert abs(found["begin"] - time.time() - 2 * HOUR) < 60
    assert re.search(r"later\s.*queued\s.*\sstarts at \d{4}-\d\d-\d\d \d\d:\d\d", common.cli("queue"))
    assert "  begin      " in common.cli("status", "later")
    common.cli("cancel", "later")
    said = common.cli("submit", "--begin", "soon", "--", "true", code=2)
    assert said == "ullage: the job: begin: time must look like 2026-11-20T08:00, 22:00 or now+2h, got 'soon'\n"


@pytest.mark.parametrize("throttle", [1, 2])
def test_of_a_throttled_array_no_more_run_at_once_than_it_says(common, throttle):
    script = "mkdir in-$ULLAGE_ARRAY_INDEX; ls -d in-* | wc -l >> counts; sleep 0.1; rmdir in-$ULLAGE_ARRAY_INDEX"
    said = common.cli("submit", "--memory", "1GiB", "--array", f"1-6%{throttle}", "--wait", "--", "sh", "-c", script)
    assert "is done" in said
    counts = [int(word) for word in (common.work / "counts").read_text().split()]
    assert len(counts) == 6 and max(counts) <= throttle
