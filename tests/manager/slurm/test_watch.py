"""Jobs of a real Slurm that ran out of GPU memory come back with more shards, once for each failure, whatever dies."""

import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time

import pytest
from tests.commands import typed_in
from tests.manager.slurm.private_slurm import PATIENCE
from tests.paths import ROOT

from ullage.cli.slurm import STATE
from ullage.errors import AlreadyServing, InvalidValue, SlurmFailed
from ullage.home import home
from ullage.manager.fault_injection import VARIABLE
from ullage.manager.placement.recovery import RecoveryRules
from ullage.manager.slurm import commands
from ullage.manager.slurm.commands import read_comment
from ullage.manager.slurm.outputs import ENDED
from ullage.manager.slurm.runs import LET_GO, RunStore
from ullage.manager.slurm.watcher import Watcher, WatchTerms
from ullage.virtual.shared_card.cards import Cards, environment

# Where the watcher may end (`ULLAGE_CRASH_AT`), in the order in which a job meets them.
CRASH_POINTS = (
    "slurm-before-decision",
    "slurm-decided",
    "slurm-requeued",
    "slurm-held",
    "slurm-more",
    "slurm-updated",
    "slurm-let-go",
    "slurm-noted",
)

SIZED = '--comment=night run ullage:{"upper":1,"shards":12}'
MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.4 GiB. "
    "Including non-PyTorch memory, this process has 14.00 GiB memory in use."
)
# The oracle: each run of a job writes down that it began, and with how much.
JOB = """#!/bin/sh
echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $SLURM_SHARDS_ON_NODE" >> "$SLURM_JOB_NAME.log"
"""
GROWS = JOB + f'[ "$SLURM_SHARDS_ON_NODE" -ge 20 ] || {{ echo "{MEMORY}" >&2; exit 1; }}\n'


class Watch:
    """A watcher with a home of its own, and the jobs that it watches."""

    def __init__(self, slurm, folder):
        self.slurm, self.folder, self.said = slurm, folder, []
        self.file = folder / "runs.db"
        self.place = [f"--chdir={folder}", "--output=%j.out"]
        self.terms = WatchTerms()

    def submit(self, text, *words, name="job.sh"):
        self.script = self.folder / name
        self.script.write_text(text)
        return self.slurm.submit("--gres=shard:12", *self.place, SIZED, *words, self.script)

    def log(self):
        file = self.folder / f"{self.script.name}.log"
        return [tuple(map(int, line.split())) for line in file.read_text().splitlines()]

    def look(self):
        store = RunStore(self.file, writes=True)
        try:
            Watcher(store, self.terms, self.said.append).look()
        finally:
            store.close()

    def crash(self, point):
        """A watcher of its own that is ended there, as by kill -9; true if it came so far."""
        child = os.fork()
        if not child:
            try:
                os.environ[VARIABLE] = point
                self.look()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        return status != 0

    def runs(self, job):
        store = RunStore(self.file)
        try:
            return store.of(job)
        finally:
            store.close()

    def until_over(self, job, state="COMPLETED", limit=PATIENCE):
        """Look again and again until the job is in that state and known to be."""

        def there():
            self.look()
            if self.runs(job) and self.runs(job)[-1].next_gres is None:
                return self.slurm.jobs()[job]["JobState"] == state
            time.sleep(0.2)  # each look takes a few processes

        self.slurm.until(there, f"job {job} is {state}; {self.said}", limit)
        return self.runs(job)


@pytest.fixture
def watch(slurm, tmp_path):
    return Watch(slurm, tmp_path)


def test_a_job_out_of_memory_finishes_with_more_shards(watch, slurm, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    watch.file = home() / STATE
    job = watch.submit(GROWS)
    first, second = watch.until_over(job)
    assert watch.log() == [(job, 0, 12), (job, 1, 21)]  # what it had and asked for, and 5 GiB more
    assert (first.cause, first.gres, first.next_gres) == ("out of GPU memory", "shard:12", "shard:21")
    assert (second.cause, second.gres, second.next_gres) == ("finished", "shard:21", None)
    [now] = commands.jobs([job])
    assert now.comment.startswith("night run ullage:")
    code, shown, _ = typed_in(monkeypatch, capsys)("slurm", "history", job)
    assert code == 0 and "out of GPU memory" in shown and "21 of 40 shards" in shown and "finished" in shown
    told = json.loads(typed_in(monkeypatch, capsys)("slurm", "history", job, "--json")[1])
    assert [run["next_gres"] for run in told] == ["shard:21", None]
    code, _, errors = typed_in(monkeypatch, capsys)("slurm", "history", 4711)
    assert code == 2 and "no finished run of job 4711" in errors
    assert read_comment(now.comment) == {"upper": 1, "shards": 21, "attempt": 2, "before": "out of GPU memory"}


TRAINING = """
import torch
wide = torch.empty(20 << 28, device="cuda")  # 20 GiB
print("trained")
"""
NEIGHBOUR = """
import os, time
from ullage.virtual.shared_card.cards import Cards
[card] = Cards.open(os.environ["ULLAGE_CARDS"]).visible(os.environ["CUDA_VISIBLE_DEVICES"])
assert card.take(30 << 30)
open("neighbour", "w").close()
time.sleep(600)
"""


def test_a_job_that_meets_a_neighbour_moves_to_a_gpu_with_room(watch, slurm):
    """A real OutOfMemoryError of a virtual GPU, which two jobs share."""
    cards = watch.folder / "cards"
    Cards.create(cards, "4xA100-40GB")
    (watch.folder / "train.py").write_text(TRAINING)
    (watch.folder / "neighbour.py").write_text(NEIGHBOUR)
    given = environment(cards, [], base={"PYTHONPATH": str(ROOT / "src")})
    del given["CUDA_VISIBLE_DEVICES"]
    begin = "#!/bin/sh\n" + "".join(f"export {name}={shlex.quote(value)}\n" for name, value in given.items())
    watch.submit(
        f"{begin}exec {sys.executable} neighbour.py\n", "--gres=shard:30", "--nodelist=n1", name="neighbour.sh"
    )
    slurm.until((watch.folder / "neighbour").exists, "the neighbour holds its memory")
    job = watch.submit(f"{begin}{sys.executable} train.py\n", "--gres=shard:8", "--nodelist=n1")
    first, second = watch.until_over(job, limit=300.0)
    assert first.cause == "out of GPU memory" and "torch.OutOfMemoryError: CUDA out of memory" in first.detail
    assert (first.gres, second.cause) == ("shard:8", "finished") and int(second.gres.removeprefix("shard:")) > 20
    assert "trained" in (watch.folder / f"{job}.out").read_text()


@pytest.mark.parametrize(
    ("text", "words", "cause"),
    [
        ("echo 'ValueError: no such file' >&2; exit 1\n", (), "failed by itself"),
        (f"echo '{MEMORY}'; echo 'ValueError: no such file'; exit 1\n", (), "failed by itself"),
        (f"echo '{MEMORY}'; echo smaller batch; exit 0\n", (), "finished"),
        (f"echo '{MEMORY}'; exit 1\n", ("--no-requeue",), "out of GPU memory"),
        (f"echo '{MEMORY}'; exit 1\n", ("--gres=gpu:1",), "out of GPU memory"),
        ("kill -9 $$\n", (), "killed"),
    ],
    ids=["a bug", "a bug after all", "overcome", "never twice", "a whole GPU", "killed"],
)
def test_a_job_that_more_memory_cannot_help_stays_out(watch, slurm, text, words, cause):
    job = watch.submit(JOB + text, *words)
    slurm.until_state(job, "FAILED", "COMPLETED")
    for _ in range(2):
        watch.look()
    [run] = watch.runs(job)
    assert run.cause == cause and run.next_gres is None
    assert len(watch.log()) == 1 and slurm.jobs()[job]["Restarts"] == "0"


def test_jobs_of_others_are_left_alone_unless_all_are_wanted(watch, slurm):
    watch.script = watch.folder / "job.sh"
    watch.script.write_text(GROWS)
    job = slurm.submit("--gres=shard:12", *watch.place, "--comment=mine", watch.script)
    slurm.until_state(job, "FAILED")
    watch.look()
    assert watch.runs(job) == []
    watch.terms = WatchTerms(every_job=True)
    watch.until_over(job)
    assert [shards for _, _, shards in watch.log()] == [12, 21] and commands.jobs([job])[0].comment == "mine"


@pytest.mark.slow
def test_a_job_gets_more_shards_then_a_whole_gpu_then_no_more(watch, slurm):
    job = watch.submit(JOB + "echo CUDA out of memory; exit 1\n")
    runs = watch.until_over(job, "FAILED")
    assert [shards for _, _, shards in watch.log()] == [12, 17, 22, 40]
    assert runs[-1].next_text.endswith("it had a GPU for itself, so no more room can be given")
    limited = watch.submit(JOB + "echo CUDA out of memory; exit 1\n", name="limited.sh")
    watch.terms = WatchTerms(RecoveryRules(attempts=2))
    assert watch.until_over(limited, "FAILED")[-1].next_text.endswith("2 attempts are the limit")
    assert len(watch.log()) == 2


def test_a_watcher_that_is_killed_anywhere_goes_on_where_it_was(watch, slurm):
    """Several jobs: one that Slurm has requeued already never comes to the points before that again."""
    jobs = [watch.submit(GROWS) for _ in range(5)]
    for job in jobs:
        slurm.until_state(job, "FAILED")
    for point in CRASH_POINTS:
        slurm.until(lambda point=point: watch.crash(point), f"it comes to {point}")
        if point in ("slurm-before-decision", "slurm-requeued"):
            watch.crash(point)  # again in the same place
    for job in jobs:
        watch.until_over(job)
    assert sorted(watch.log()) == [run for job in jobs for run in ((job, 0, 12), (job, 1, 21))]


@pytest.mark.parametrize("point", ["slurm-requeued", pytest.param("slurm-let-go", marks=pytest.mark.slow)])
def test_a_controller_that_is_killed_meanwhile_costs_nothing(watch, slurm, point):
    job = watch.submit(GROWS)
    slurm.until_state(job, "FAILED")
    slurm.until_saved()  # what it has not saved is lost
    slurm.until(lambda: watch.crash(point), f"it comes to {point}")
    slurm.kill_daemon("slurmctld")
    slurm.start_daemon("slurmctld")
    watch.until_over(job)
    shards = [shards for _, _, shards in watch.log()]
    assert shards[0] == 12 and shards[-1] == 21 and set(shards) == {12, 21}
    assert shards.count(21) == 1


def test_forgotten_orders_of_a_controller_are_repeated(watch, slurm):
    """It loses its last writes: afterwards it shows the failure as if nothing had been done about it."""
    job = watch.submit(GROWS)
    slurm.until_state(job, "FAILED")
    slurm.run("scontrol", "update", "NodeName=n[1-3]", "State=drain", "Reason=test")
    slurm.kill_daemon("slurmctld", signal.SIGTERM)
    shutil.copytree(slurm.folder / "state", watch.folder / "state")
    slurm.start_daemon("slurmctld")
    slurm.until(lambda: watch.look() or watch.runs(job)[0].step == LET_GO, "the job was let go")
    assert slurm.jobs()[job]["JobState"] == "PENDING"
    slurm.kill_daemon("slurmctld")
    shutil.copytree(watch.folder / "state", slurm.folder / "state", dirs_exist_ok=True)
    slurm.start_daemon("slurmctld")
    assert (slurm.jobs()[job]["JobState"], slurm.jobs()[job]["Restarts"]) == ("FAILED", "0")
    slurm.run("scontrol", "update", "NodeName=n[1-3]", "State=resume", check=False)
    watch.until_over(job)
    assert watch.log() == [(job, 0, 12), (job, 1, 21)]


def test_output_of_earlier_run_does_not_count_for_a_later_one(watch, slurm):
    text = JOB + f'[ -n "$SLURM_RESTART_COUNT" ] && exit 3\necho "{MEMORY}"; exit 1\n'
    job = watch.submit(text, "--open-mode=append")
    runs = watch.until_over(job, "FAILED")
    assert [run.cause for run in runs] == ["out of GPU memory", "failed by itself"]
    assert len(watch.log()) == 2


def test_the_epilog_keeps_what_a_job_printed_on_its_node(watch, slurm, monkeypatch, capsys):
    spool = watch.folder / "shared"
    epilog = slurm.folder / "epilog.sh"
    epilog.write_text(typed_in(monkeypatch, capsys)("slurm", "epilog", spool)[1])
    epilog.chmod(0o755)
    slurm.reconfigure(f"Epilog={epilog}")
    try:
        slurm.until(lambda: epilog_ran(slurm, spool, watch.place), "the node knows its epilog")
        job = watch.submit(GROWS, "--error=%j.err", "--nodelist=n1")
        slurm.until_state(job, "FAILED")
        slurm.until(lambda: len(list((spool / ENDED).glob(f"{job}.0.n1.*"))) == 2, "the epilog has run")
        for name in ("out", "err"):
            (watch.folder / f"{job}.{name}").unlink()
        watch.terms = WatchTerms(spool=spool)
        assert watch.until_over(job)[0].cause == "out of GPU memory"
        (spool / ENDED / f"{job}.2.n1.1").write_text("0 0\n")  # an epilog that is late
        slurm.until(lambda: watch.look() or not list((spool / ENDED).iterdir()), "nothing that was kept is left")
    finally:
        slurm.reconfigure("")


def epilog_ran(slurm, spool, place):
    """Whether the node runs its epilog by now, tried with a job that fails."""
    job = slurm.submit("--nodelist=n1", *place, SIZED, "--wrap", "echo; exit 1")
    slurm.until_state(job, "FAILED")
    kept = list((spool / ENDED).glob(f"{job}.0.n1.*"))
    for file in kept:
        file.unlink()
    return kept


@pytest.mark.slow
def test_one_watcher_runs_at_a_time_and_survives_a_slurm_outage(watch, slurm):
    job = watch.submit(GROWS)
    slurm.until_state(job, "FAILED")
    store, ending = RunStore(watch.file, writes=True), threading.Event()
    with pytest.raises(AlreadyServing, match="another"):
        RunStore(watch.file, writes=True)
    store.close()
    slurm.kill_daemon("slurmctld", signal.SIGTERM)
    with pytest.raises(SlurmFailed, match="slurmctld"):
        watch.look()
    thread = threading.Thread(
        target=lambda: Watcher(RunStore(watch.folder / "other.db", writes=True), WatchTerms(), watch.said.append).run(
            0.1, ending
        )
    )
    thread.start()
    try:
        slurm.until(lambda: watch.said, "it says that Slurm is away")
        slurm.start_daemon("slurmctld")
        slurm.until(lambda: len(watch.log()) == 2, "the job came back")
    finally:
        ending.set()
        thread.join()


def test_an_invalid_store_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="does not exist yet; type: ullage slurm watch"):
        RunStore(tmp_path / "none.db")
    (tmp_path / "text.db").write_text("something else " * 100)
    with pytest.raises(InvalidValue, match="cannot be read"):
        RunStore(tmp_path / "text.db")
