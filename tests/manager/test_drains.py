"""GPUs that are drained for a time or for all but some users: kept from others in time, through crashes, and said."""

import grp
import os
import pwd
import time

import pytest

from ullage.errors import InvalidValue, NotAllowed
from ullage.manager.client import Client
from ullage.manager.identity import Caller

ME = pwd.getpwuid(os.getuid()).pw_name
MY_GROUP = grp.getgrgid(os.getgid()).gr_name
OTHER = "nobody" if ME != "nobody" else "root"
HOUR = 3600.0


@pytest.fixture
def one(home):
    """A daemon with one GPU."""
    home.options = ["--virtual", "1xA100-40GB", "--estimator", "none"]
    home.start()
    return home


def reason_of(home, job, word):
    home.until(lambda: word in (home.job(job)["reason"] or ""), "a reason")
    return home.job(job)["reason"]


def drains(client):
    """The drains of all GPUs but those that are for all and have no end, in words."""
    return [each["text"] for gpu in client.gpus() for each in gpu["bookings"]]


def test_a_job_of_others_waits_for_a_drain_and_says_why(one):
    said = one.cli("admin", "drain", "0", "--allow", OTHER, "--until", "now+4h", "--reason", "demo")
    assert said.startswith("GPU 0 (") and f") is drained for all but {OTHER} from " in said and "(demo)\n" in said
    job = one.submit()
    assert f"is drained for all but {OTHER} from" in reason_of(one, job, "drained")
    assert f"is drained for all but {OTHER}" in one.cli("queue", "--show-gpus")
    one.kill()
    one.start()
    reason_of(one, job, "drained")
    assert one.job(job)["state"] == "queued" and "(demo)" in drains(one.client)[0], "it survives a crash"
    assert one.cli("admin", "resume", "0").endswith(") gets new jobs again\n")
    assert one.wait(job)["state"] == "done"
    one.until(lambda: drains(one.client) == [], "the drain to be gone")


def test_before_it_begins_only_jobs_start_that_are_over_by_then(one):
    one.client.drain(0, begin=time.time() + 2 * HOUR, until=time.time() + 3 * HOUR, allow=[OTHER])
    endless, short = one.submit(), one.submit(time_limit="1h")
    assert one.wait(short)["state"] == "done"
    assert "drained" in reason_of(one, endless, "drained")
    assert one.wait(one.submit(gpus=0, memory=None))["state"] == "done", "who needs no GPU is not concerned"


@pytest.mark.parametrize("until", [None, 3 * HOUR])
def test_a_coming_drain_keeps_out_jobs_that_might_still_run(one, until):
    one.client.drain(0, begin=time.time() + 2 * HOUR, until=until and time.time() + until)
    endless, short = one.submit(), one.submit(time_limit="1h")
    assert one.wait(short)["state"] == "done"
    assert "is drained from" in reason_of(one, endless, "drained")
    assert "is drained from" in one.cli("admin", "resume", "0"), "it has not begun, and stays"
    assert one.cli("admin", "resume", "0", "--all").endswith(") gets new jobs again\n")
    assert one.wait(endless)["state"] == "done"


@pytest.mark.parametrize("whom", [[ME], [f"@{MY_GROUP}"], [OTHER, f"@{MY_GROUP}"]])
def test_jobs_of_those_whom_it_lets_in_may_start(one, whom):
    one.client.drain(0, until=time.time() + HOUR, allow=whom)
    assert one.wait(one.submit())["state"] == "done"


def test_drain_that_is_made_while_jobs_wait_holds_for_them_too(one):
    first = one.submit(proceed="proceed", exclusive=True)
    one.wait(first, "running")
    second = one.submit()
    reason_of(one, second, "GPU")
    one.client.drain("0", until=time.time() + HOUR, allow=[OTHER])
    one.go()
    assert one.wait(first)["state"] == "done", "who runs there goes on"
    assert "drained" in reason_of(one, second, "drained")
    one.client.resume(0)
    assert one.wait(second)["state"] == "done"


def test_a_drain_ends_by_itself(make_here):
    here = make_here()
    here.call("drain", gpu=0, until=time.time() + HOUR, allow=[OTHER])
    job = here.submit("true")
    here.until(lambda: "drained" in (here.job(job)["reason"] or ""), "a reason")
    here.moved = 2 * HOUR
    assert here.until_over(job)["state"] == "done"
    assert [gpu["bookings"] for gpu in here.call("gpus")] == [()]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpu": 7}, "the GPU must be named by index or UUID, got '7'"),
        ({"allow": ["nobody-at-all"]}, "this system has no user 'nobody-at-all'"),
        ({"allow": ["@no-such-group"]}, "this system has no group 'no-such-group'"),
        ({"until": 1000.0}, "a drain must not be over"),
        ({"begin": 1000.0, "until": 2000.0}, "a drain must not be over"),
        ({"begin": 4e9, "until": 4e9}, "a drain must not be over"),
        ({"until": 9e9}, "must last at most 366 days"),
    ],
)
def test_contradictory_orders_are_refused(common, asked, message):
    with pytest.raises(InvalidValue, match=message):
        common.client.drain(**{"gpu": 0, "allow": [OTHER], **asked})
    assert drains(common.client) == []


def test_two_drains_of_a_gpu_for_a_time_do_not_overlap(common):
    now = time.time()
    ten, eleven = now + 10 * HOUR, now + 11 * HOUR
    common.client.drain(1, "first", ten, eleven, [OTHER])
    with pytest.raises(InvalidValue, match="; undo that with 'ullage admin resume --all'"):
        common.client.drain(1, "", now + 10.5 * HOUR, eleven, [ME])
    common.client.drain(1, "", eleven, eleven + HOUR, [ME])
    common.client.drain(0, "", ten, eleven, [ME])
    common.until(lambda: len(drains(common.client)) == 3, "all to be seen")
    common.client.drain(1, "the fan is loud")
    common.until(lambda: common.client.gpus()[1]["drained"], "it to be drained for all")
    common.client.resume(1)
    common.until(lambda: not common.client.gpus()[1]["drained"], "it to be resumed")
    assert len(drains(common.client)) == 3, "those to come stay"
    for gpu in (0, 1):
        common.client.resume(gpu, later=True)
    common.until(lambda: not drains(common.client), "them to be gone")


def test_only_operators_drain(make_here):
    here = make_here()
    stranger = Caller(4242, 4242, "stranger", False)
    for verb, arguments in (("drain", {"gpu": 0, "allow": [OTHER]}), ("resume", {"gpu": 0})):
        with pytest.raises(NotAllowed, match="operators may"):
            here.call_as(stranger, verb, arguments)


def test_over_http_it_is_the_same(home):
    home.options += ["--api", "0"]
    home.start()
    where = home.client.call("api")
    with Client(url=where["url"], token=where["token"]) as remote:
        made = remote.drain("0", "demo/1", until=time.time() + HOUR, allow=[OTHER])
        home.until(lambda: drains(remote) == drains(home.client) == [made["text"]], "the drain")
        assert remote.resume(0)["text"] == "" and not remote.resume(0, later=True)["drained"]
        home.until(lambda: drains(remote) == [], "its end")
