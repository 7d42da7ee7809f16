"""GPUs that are reserved for a user or a group: kept from others in time, through crashes, and said."""

import grp
import json
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


def test_a_job_of_others_waits_until_the_reservation_is_gone_and_says_why(one):
    said = one.cli("reserve", "0", "--user", OTHER, "--for", "4h", "--name", "demo")
    assert said.startswith(f"reservation 1 (demo): GPU 0 for {OTHER}, ")
    job = one.submit()
    assert f"is reserved for {OTHER} from" in reason_of(one, job, "reserved")
    assert f"is reserved for {OTHER}" in one.cli("queue", "--show-gpus")
    one.kill()
    one.start()
    assert one.cli("reservations").startswith("reservation 1 (demo)"), "it survives a crash"
    reason_of(one, job, "reserved")
    assert one.job(job)["state"] == "queued"
    one.cli("unreserve", "demo")
    assert one.wait(job)["state"] == "done"
    assert one.cli("reservations") == "no GPUs are reserved\n"


def test_before_it_begins_only_jobs_start_that_are_over_by_then(one):
    one.client.reserve([0], seconds=HOUR, begin=time.time() + 2 * HOUR, users=[OTHER])
    endless, short = one.submit(), one.submit(time_limit="1h")
    assert one.wait(short)["state"] == "done"
    assert "reserved" in reason_of(one, endless, "reserved")
    assert one.wait(one.submit(gpus=0, memory=None))["state"] == "done", "who needs no GPU is not concerned"


@pytest.mark.parametrize("whom", [{"users": [ME]}, {"groups": [MY_GROUP]}, {"users": [OTHER], "groups": [MY_GROUP]}])
def test_jobs_of_those_it_is_for_may_start(one, whom):
    one.client.reserve([0], seconds=HOUR, **whom)
    assert one.wait(one.submit())["state"] == "done"


def test_a_reservation_that_is_made_while_jobs_wait_holds_for_them_too(one):
    first = one.submit(proceed="proceed", exclusive=True)
    one.wait(first, "running")
    second = one.submit()
    reason_of(one, second, "GPU")
    one.client.reserve(["0"], seconds=HOUR, users=[OTHER])
    one.go()
    assert one.wait(first)["state"] == "done", "who runs there goes on"
    assert "reserved" in reason_of(one, second, "reserved")
    one.client.unreserve(1)
    assert one.wait(second)["state"] == "done"


def test_a_reservation_ends_by_itself(make_here):
    here = make_here()
    here.call("reserve", gpus=[0], seconds=HOUR, users=[OTHER])
    job = here.submit("true")
    here.until(lambda: "reserved" in (here.job(job)["reason"] or ""), "a reason")
    here.moved = 2 * HOUR
    assert here.until_over(job)["state"] == "done"
    assert here.call("reservations") == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpus": [7]}, "needed a GPU by index or UUID; found '7'"),
        ({"gpus": []}, "needed the GPUs to reserve"),
        ({"users": []}, "needed a user or a group to reserve for; found neither"),
        ({"users": ["nobody-at-all"]}, "needed a user of this system; found no 'nobody-at-all'"),
        ({"groups": ["no-such-group"]}, "needed a group of this system; found no 'no-such-group'"),
        ({"seconds": 0.0}, "needed a time that is not over"),
        ({"begin": 1000.0}, "needed a time that is not over"),
        ({"seconds": 1e9}, "of at most 366 days"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(common, asked, message):
    with pytest.raises(InvalidValue, match=message):
        common.client.reserve(**{"gpus": [0], "seconds": HOUR, "users": [OTHER], **asked})
    assert common.client.reservations() == []


def test_two_reservations_of_a_gpu_do_not_overlap(common):
    now = time.time()
    common.client.reserve([1], HOUR, now + 10 * HOUR, [OTHER], name="first")
    with pytest.raises(InvalidValue, match="already; 'ullage unreserve 1' takes that back"):
        common.client.reserve([0, 1], HOUR, now + 10.5 * HOUR, [ME])
    common.client.reserve([1], HOUR, now + 11 * HOUR, [ME])
    common.client.reserve([0], HOUR, now + 10 * HOUR, [ME])
    shown = json.loads(common.cli("reservations", "--json"))
    assert [(each["indices"], each["users"]) for each in shown] == [([1], [OTHER]), ([0], [ME]), ([1], [ME])]
    for each in shown:
        common.client.unreserve(each["id"])
    assert "There are: none" in common.cli("unreserve", "first", code=2)


def test_only_operators_reserve(make_here):
    here = make_here()
    stranger = Caller(4242, 4242, "stranger", False)
    for verb, arguments in (
        ("reserve", {"gpus": [0], "seconds": HOUR, "users": [OTHER]}),
        ("unreserve", {"reservation": 1}),
    ):
        with pytest.raises(NotAllowed, match="operators may"):
            here.daemon.call_from_thread(stranger, verb, arguments)
    assert here.daemon.call_from_thread(stranger, "reservations", {}) == []


def test_over_http_it_is_the_same(home):
    home.options += ["--api", "0"]
    home.start()
    where = home.client.call("api")
    with Client(url=where["url"], token=where["token"]) as remote:
        made = remote.reserve(["0"], HOUR, users=[OTHER], name="demo/1")
        assert remote.reservations() == home.client.reservations() == [made]
        assert remote.unreserve(made["id"]) == made and remote.reservations() == []
