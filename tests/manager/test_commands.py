"""The command line as people use it."""

import json
import re
import subprocess
import sys

import pytest


def test_without_a_daemon_every_command_says_how_to_start_one(home):
    commands = (
        ["queue"],
        ["status", "1"],
        ["logs", "1"],
        ["cancel", "1"],
        ["edit", "1", "--hold"],
        ["edit", "1", "--release"],
    )
    more = (
        ["wait", "1"],
        ["admin", "drain", "0"],
        ["admin", "resume", "0"],
        ["queue", "--over"],
        ["submit", "--", "true"],
    )
    for words in (commands + more)[::3]:
        assert home.cli(*words, code=1) == "ullage: no daemon is running: start it with `ullage serve`\n"


def test_without_gpus_the_message_names_virtual_ones(home):
    assert "ullage serve --virtual 4xA100-40GB" in home.cli("serve", code=1)


def test_a_second_daemon_of_a_home_is_refused(common):
    said = common.cli("serve", "--virtual", "2xA100-40GB", code=1)
    assert re.fullmatch(
        rf"ullage: a daemon is already running in {common.folder} \(process {common.process.pid}\); .*\n", said
    )


def test_a_wrong_name_lists_the_right_ones(home):
    assert "did you mean 'magm'?" in home.cli("serve", "--virtual", "T4", "--policy", "magn", code=2)
    assert "no estimator named 'horuss'" in home.cli("serve", "--virtual", "T4", "--estimator", "horuss", code=2)
    (home.folder / "bad.toml").write_text("[placing]\nmargn = 1\n")
    said = home.cli("serve", "--virtual", "T4", "--settings", str(home.folder / "bad.toml"), code=2)
    assert "there is no 'placing.margn'; did you mean 'margin'?" in said


@pytest.mark.parametrize(
    ("options", "other"),
    [(["--hold", "--release"], "--release"), (["--requeue", "--priority", "5"], "other changes")],
)
def test_edit_refuses_orders_that_exclude_each_other(home, options, other):
    said = home.cli("edit", "1", *options, code=2)
    assert said == f"ullage: {options[0]} must stand alone, got {other} too\n"


def test_submit_and_wait_give_the_output_and_the_exit_code(common):
    said = common.cli("submit", "--memory", "2GiB", "--name", "greeting", "--wait", "--", "sh", "-c", "echo hello")
    number = re.match(r"job (\d+): queued, promise 2.00 GiB \(as its submitter says\)\n", said)[1]
    assert said.endswith(f"job {number} is done\n")
    assert common.cli("logs", number) == "hello\n"
    assert common.cli("logs", "-f", "greeting") == "hello\n"
    assert "greeting, done" in common.cli("status", "greeting")
    assert "finished" in common.cli("queue", "--over")
    common.cli("submit", "--memory", "2GiB", "--wait", "--", "sh", "-c", "exit 7", code=7)


def test_words_with_spaces_and_quotes_stay_unchanged(common):
    words = ["a b", "$(touch never)", "';&|", '"', "*"]
    common.cli("submit", "--memory", "1GiB", "--name", "words", "--wait", "--", "printf", "%s\\n", *words)
    assert common.cli("logs", "words").splitlines() == words


def test_the_queue_says_why_a_job_waits(common):
    large = common.script("touch large; while [ ! -e proceed ]; do sleep 0.05; done", memory=39 << 30, gpus=2)
    common.until((common.work / "large").exists, "the large job")
    small = common.submit(memory=5 << 30)
    common.until(lambda: "GiB" in (common.job(small)["reason"] or ""), "a reason")
    shown = common.cli("queue", "--show-gpus")
    assert re.search(rf"^{large}\t.*\trunning\t.*\ton GPU 0, GPU 1", shown, re.MULTILINE)
    assert re.search(rf"^{small}\t.*\tqueued\t.*\tneeds 5.00 GiB on a GPU; GPU", shown, re.MULTILINE)
    assert json.loads(common.cli("queue", "--json"))[-1]["id"] == small
    common.go()
    common.wait(small), common.wait(large)
    (common.work / "proceed").unlink()


def test_a_held_job_waits_for_its_release(common):
    number = common.script("true", hold=True)
    assert common.job(number)["state"] == "held"
    assert common.cli("edit", "--release", str(number)) == f"job {number} is released\n"
    assert common.wait(number)["state"] == "done"
    assert "cannot release: the job must be held" in common.cli("edit", "--release", str(number), code=1)


def test_jobs_are_held_cancelled_and_waited_for_by_command(common):
    after = common.script("true", hold=True)
    number = str(common.script("true", after=[{"job": after, "kind": "ok"}]))
    assert common.cli("edit", "--hold", number) == f"job {number} is held\n"
    common.cli("edit", "--release", str(after), number)
    assert f"job {number} is done" in common.cli("wait", number)
    failing = str(common.script("exit 9"))
    common.cli("wait", failing, code=9)
    running = common.submit(proceed="never")
    common.wait(running, "running")
    assert common.cli("cancel", str(running)) == f"job {running} is being stopped\n"
    assert common.wait(running)["state"] == "cancelled"


def test_a_higher_priority_goes_first(common):
    blocker = common.submit(proceed="first", gpus=2, exclusive=True)
    common.wait(blocker, "running")
    said = "echo $ULLAGE_JOB_ID >> order"
    low, high = (common.script(said, gpus=2, exclusive=True, priority=priority) for priority in (0, 5))
    common.go("first")
    common.wait(low), common.wait(high)
    assert (common.work / "order").read_text().split() == [str(high), str(low)]


def test_a_full_queue_takes_no_more(home):
    home.settings += "[access]\nqueue_limit = 2\n"
    home.start()
    home.script("true", hold=True), home.script("true", hold=True)
    said = home.cli("submit", "--memory", "1GiB", "--", "true", code=2)
    assert said == "ullage: the queue is full: 2 jobs are its limit (access.queue_limit in the settings)\n"


def test_an_array_has_a_job_an_index(common):
    said = common.cli(
        "submit", "--memory", "1GiB", "--array", "3-5", "--wait", "--", "sh", "-c", "echo {index} $ULLAGE_ARRAY_INDEX"
    )
    array = re.search(r"\(array (\d+)\)", said)[1]
    assert [common.cli("logs", f"{array}_{index}") for index in (3, 4, 5)] == ["3 3\n", "4 4\n", "5 5\n"]
    assert len(common.client.call("status", job=f"{array}_all")) == 3


def test_dependencies_are_kept(common):
    first = common.script("true", hold=True)
    good = common.cli("submit", "--memory", "1GiB", "--after", str(first), "--json", "--", "true")
    failing = common.script("exit 1", hold=True)
    needs_ok = common.script("true", after=[{"job": failing, "kind": "ok"}])
    needs_any = common.script("true", after=[{"job": failing, "kind": "any"}])
    waiting = json.loads(good)["jobs"][0]
    common.until(lambda: common.job(waiting)["reason"] == f"waits for job {first}", "the reason")
    common.client.call("release", jobs=[first, failing])
    assert common.wait(waiting)["state"] == "done"
    assert common.wait(needs_any)["state"] == "done"
    job = common.wait(needs_ok)
    assert (job["state"], job["detail"]) == ("cancelled", f"job {failing}, which it needs, did not end well")


def test_a_job_file_is_submitted(common):
    (common.work / "job.toml").write_text(
        'command = ["sh", "-c", "echo $WORD in $PWD"]\nmemory = "3GiB"\nname = "filed"\n[env]\nWORD = "hello"\n'
    )
    said = common.cli("submit", "job.toml", "--wait")
    assert "promise 3.00 GiB" in said and common.cli("logs", "filed") == f"hello in {common.work}\n"
    (common.work / "job.rad").write_text(
        "# the listing\npython -c 'print(1)'\nbatch_size: 32\npolicy: exclusive\ngpus: 1\n"
    )
    answer = json.loads(common.cli("submit", "job.rad", "--json"))
    assert common.wait(answer["jobs"][0])["attempts"][0]["exclusive"]
    (common.work / "bad.toml").write_text('comand = "x"\n')
    assert "bad.toml" in common.cli("submit", "bad.toml", code=2)


def test_a_drained_gpu_gets_no_job_until_it_is_resumed(common):
    assert "GPU 0" in common.cli("admin", "drain", "0", "--reason", "dust")
    jobs = [common.script("true") for _ in range(4)]
    uuid = common.client.call("gpus")[0]["id"]
    assert uuid not in {slot for job in jobs for a in common.wait(job)["attempts"] for slot in a["slots"]}
    assert "dust" in common.cli("queue", "--show-gpus")
    common.cli("admin", "resume", "0")
    common.until(lambda: not common.client.call("gpus")[0]["drained"], "the GPU to be there again")
    assert "the GPU must be named by index or UUID, got '9'" in common.cli("admin", "drain", "9", code=2)


def test_logs_follow_a_job_to_its_end(common):
    number = common.script("echo one; while [ ! -e more ]; do sleep 0.05; done; echo two")
    following = subprocess.Popen(
        [sys.executable, "-m", "ullage", "logs", "-f", str(number)], env=common.environment(), stdout=subprocess.PIPE
    )
    assert following.stdout.readline() == b"one\n"
    (common.work / "more").touch()
    assert following.communicate(timeout=60)[0] == b"two\n"


def test_numbers_of_jobs_complete(common):
    number = common.script("true", hold=True)
    from ullage.cli import completion

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ULLAGE_HOME", str(common.folder))
        assert (str(number), "sh, held") in completion.jobs(str(number)[:1])
    common.client.call("cancel", jobs=[number])


def test_more_than_there_is_is_refused_at_once(common):
    said = common.cli("submit", "--memory", "50GiB", "--", "true", code=2)
    assert said == "ullage: the job asks for 50.0 GiB of GPU memory; the largest GPU has 39.4 GiB\n"
    assert common.cli("submit", "--gpus", "3", "--", "true", code=2) == "ullage: the job asks for 3 GPUs; there are 2\n"
    assert "no job 99999" in common.cli("submit", "--after", "99999", "--", "true", code=2)


def test_a_script_alone_is_enough(common):
    (common.work / "hello.py").write_text("print('hello')\n")
    assert "is done" in common.cli("submit", "hello.py", "--wait")
    assert common.cli("logs", "hello.py") == "hello\n"


def test_job_names_and_output_cannot_control_the_terminal(common):
    """Escape sequences and characters that turn the writing round: in its name, its program, its folder, its words."""
    evil = "\x1b[2J\u202egone\x9b\u2066"
    program = common.work / evil
    program.write_text(f"#!/bin/sh\necho 'torch.OutOfMemoryError: CUDA out of memory {evil}'; exit 1")
    program.chmod(0o755)
    failed = common.submit([str(program), evil], exclusive=True, memory=None)
    named = common.submit(["true"], name=f"a name {evil}", hold=True)
    common.wait(failed)
    said = [
        common.cli(*words)
        for words in (["queue", "--over"], ["queue"], ["status", str(failed)], ["status", str(named)])
    ]
    said.append(common.cli("wait", str(failed), code=1))
    said.append(common.cli("cancel", evil, code=2))
    for text in said:
        assert text.replace("\n", "").replace("\t", "").isprintable(), text
    assert "?[2J?gone" in said[0] and "a name ?[2J?gone" in said[1] and "CUDA out of memory ?[2J" in said[2]
    assert common.job(named)["name"] == "a name ?[2J?gone??", "at the door, too"
    assert json.loads(common.cli("status", str(failed), "--json"))[0]["command"][1] == evil, "JSON is exact"
    common.client.cancel(named)
