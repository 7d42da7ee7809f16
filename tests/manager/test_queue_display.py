"""The queue as people and programs see it: arrays folded, pages, columns, and reasons that are never cut off."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys

import pytest

from ullage.cli.job_tables import OVER, QUEUE, chosen, table
from ullage.errors import JobNotFound, UnknownName
from ullage.jobs.schedules import parse_array
from ullage.manager.core.views import ranges

MANY = 40


@pytest.fixture(scope="module")
def busy(_of_module):
    """A daemon with one running job, an array that waits for it, and one job that is over."""
    _of_module.script("exit 3", name="a job whose name is longer than any table has room for")
    blocker = _of_module.submit(proceed="proceed", gpus=2, exclusive=True)
    _of_module.wait(blocker, "running")
    _of_module.array = _of_module.submit(exclusive=True, array=f"1-{MANY}", name="sweep")
    _of_module.until(lambda: "GPU" in (_of_module.job(f"{_of_module.array}_1")["reason"] or ""), "a reason")
    yield _of_module
    _of_module.go()
    _of_module.client.cancel(f"{_of_module.array}_all")


def test_jobs_of_an_array_that_wait_are_one_row(busy):
    found = busy.client.folded_queue()
    running, waiting = found["rows"]
    assert (running["state"], running["jobs"], running["indices"]) == ("running", 1, None)
    assert (waiting["id"], waiting["jobs"], waiting["indices"]) == (busy.array, MANY, f"1-{MANY}")
    assert (found["jobs"], found["all_rows"], found["states"]) == (MANY + 1, 2, {"running": 1, "queued": MANY})
    live = busy.client.folded_queue(live=True)
    assert [row["id"] for row in live["rows"]] == [running["id"]] and live["states"] == found["states"]
    busy.client.hold(f"{busy.array}_[2-4,9]")
    rows = [(row["state"], row["indices"]) for row in busy.client.folded_queue()["rows"][1:]]
    assert rows == [("queued", f"1,5-8,10-{MANY}"), ("held", "2-4,9")]
    busy.client.release(f"{busy.array}_[1-{MANY}]")
    assert busy.client.folded_queue(limit=1, offset=1)["rows"][0]["jobs"] == MANY
    with pytest.raises(JobNotFound):
        busy.client.hold(f"{busy.array}_[99]")


def test_the_list_of_all_jobs_is_still_there_and_can_be_paged(busy):
    everything = busy.client.queue()
    assert [job["id"] for job in everything][1:] == list(range(busy.array, busy.array + MANY))
    assert busy.client.queue(limit=3, offset=2) == everything[2:5] or len(busy.client.queue(limit=3, offset=2)) == 3
    assert len(json.loads(busy.cli("queue", "--json"))) == MANY + 1


def test_programs_get_plain_values_with_tabs(busy):
    rows = [line.split("\t") for line in busy.cli("queue", "--format", "id,state,jobs,promise,why").splitlines()]
    assert rows[1][:4] == [f"{busy.array}_[1-{MANY}]", "queued", str(MANY), str(1 << 30)] and "GPU" in rows[1][4]
    assert busy.cli("queue", "--all", "--format", "id").split()[1:] == [f"{busy.array}_{n}" for n in range(1, MANY + 1)]
    [ended] = [line.split("\t") for line in busy.cli("queue", "--over", "--format", "name,exit,why").splitlines()]
    assert ended == ["a job whose name is longer than any table has room for", "3", "failed by itself: exit code 3"]
    said = busy.cli("queue", "--format", "id,stat", code=2)
    assert "no column named 'stat'" in said and "'state'" in said


def in_terminal(home, *words, lines=24, columns=80, **variables):
    """What a command writes into a terminal of that size."""
    ours, theirs = pty.openpty()
    size = {"LINES": str(lines), "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "ullage", *words]
    process = subprocess.Popen(command, stdout=theirs, stdin=theirs, env=home.environment() | size | variables)
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # as Linux says that nobody holds the other end any more
            break
        if not piece:
            break
        written += piece
    os.close(ours)
    assert process.wait() == 0
    return written.decode().replace("\r\n", "\n")


def test_people_get_a_table_that_fits_and_a_pager_if_it_is_long(busy):
    shown = in_terminal(busy, "queue", columns=100)
    assert re.search(rf"^{busy.array}_\[1-{MANY}\] +root|\w+ +sweep +queued {MANY} ", shown, re.MULTILINE)
    assert f"{MANY + 1} jobs: {MANY} queued, 1 running" in shown and "paged" not in shown
    assert all(len(line) <= 100 for line in shown.splitlines())
    paged = in_terminal(busy, "queue", "--all", PAGER=f"{shutil.which('sed')} s/^/paged:/")
    assert paged.count("paged:") > MANY
    assert "1 more rows" in in_terminal(busy, "queue", "--limit", "1")


def test_why_it_ended_is_never_cut_off():
    why = "its program printed " + " ".join(f"word{number}" for number in range(60))
    job = {
        "id": 123456,
        "array_id": 123456,
        "array_index": 1,
        "user": "somebody-long",
        "name": "n" * 100,
        "ran": 5.0,
        "state": "failed",
        "ended": 1e9,
        "waited": 1e5,
        "completion": 1e6,
        "cause": "failed by itself",
        "detail": why,
        "alone": None,
        "gpus": 1,
        "promise": 1 << 30,
    }
    for width in (75, 80, 120, 200):
        for names in (OVER, QUEUE, "id,why"):
            lines = table([job], chosen(names), width).splitlines()
            assert " ".join(" ".join(lines).split()).count("word") == 60 and "word59" in lines[-1]
            assert max(map(len, lines[1:])) <= width


def test_a_job_that_uses_more_than_promised_is_flagged(make_here):
    here = make_here()
    number = here.submit("while [ ! -e proceed ]; do sleep 0.05; done")
    here.until(lambda: here.job(number)["state"] == "running", "the job to run")
    context = here.daemon.context
    attempt = context.store.attempts[number]

    def flagged():
        context.used = {attempt.token: {attempt.slots[0]: 20 << 30}}  # until the next look at the GPU
        return here.call("queue")[0]["over_promise"]

    assert not here.job(number)["over_promise"]
    here.until(flagged, "the flag")


def test_a_column_that_is_not_there_is_refused():
    assert chosen("id, why") == ["id", "why"]
    with pytest.raises(UnknownName):
        chosen("id,no such")


def test_ranges_are_read_as_they_are_written():
    for indices in ([5], [1, 2, 3], [1, 3, 4, 9, 10, 11, 100]):
        assert parse_array(ranges(indices)) == indices
