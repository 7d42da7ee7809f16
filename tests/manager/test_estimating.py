"""Estimates on the way in: in a process of their own, within limits, kept by content."""

import asyncio
import contextlib
import dataclasses
import grp
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tests.manager.conftest import answer_of
from tests.manager.test_users import as_user
from tests.paths import public_python

from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.jobs.command import python_of, script_of
from ullage.jobs.job_files import JobSpec
from ullage.manager.core.daemon import make_daemon
from ullage.manager.core.estimates import (
    EstimateAnswer,
    EstimateQuestion,
    EstimateRequest,
    Estimates,
    key_of,
)
from ullage.manager.settings import EstimateSettings, read_settings
from ullage.sandbox import parent
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.parent import Outcome
from ullage.sandbox.process_identity import start_of
from ullage.sandbox.recording import Reads

TRAIN = """
import json, os, torch
model = torch.nn.Linear(512, json.load(open("cfg.json"))["width"]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(int(os.environ["BATCH"]), 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_estimate_is_kept_while_all_that_it_read_is_the_same(home):
    home.options = ["--virtual", "1xA100-40GB"]
    home.start()
    (home.work / "train.py").write_text(TRAIN)
    config = home.work / "cfg.json"
    config.write_text('{"width": 512}')

    def estimated(batch, **more):
        env = {**home.environment(), "BATCH": batch}
        number = home.submit([sys.executable, "train.py"], memory=None, hold=True, env=env, **more)
        home.until(lambda: home.job(number)["estimate"], "the estimate")
        found = home.job(number)
        return found["promise"], found["estimate"].endswith("(kept from before)")

    first, kept = estimated("8")
    assert 400 << 20 < first < 2 << 30 and not kept
    assert estimated("8") == (first, True)
    parts = [home.job(number)["breakdown"] for number in (1, 2)]
    assert parts[0] == parts[1] and parts[0]["parameters"] > 0 and sum(parts[0].values()) <= first
    more, kept = estimated("500000")
    assert more > first + (500 << 20) and not kept, "a variable that the script read is another"
    config.write_text('{"width": 16384}')
    wide, kept = estimated("8")
    assert wide > first + (16 << 20) and not kept, "a file that the script read is another"
    config.write_text('{"width": 512}')
    home.kill()
    home.start()
    assert estimated("8") == (first, True), "what was kept outlives the daemon"


def test_a_failed_estimate_is_reported_and_its_job_is_unknown(home):
    home.options = ["--virtual", "2xA100-40GB"]
    home.settings += "[estimating]\ntimeout = 0.05\n"
    home.start()
    (home.work / "train.py").write_text(
        "import os, time\nwhile not os.path.exists('estimated'):\n    time.sleep(0.02)\n"
    )
    number = home.submit([sys.executable, "train.py"], memory=None)
    home.until(lambda: home.job(number)["estimate"], "the note of the estimate")
    (home.work / "estimated").touch()
    job = home.wait(number)
    assert job["state"] == "done" and job["promise"] is None
    assert job["estimate"] == "not estimated: it took longer than 50 ms"
    assert job["attempts"][0]["exclusive"], "the default rule for unknowns is a GPU for itself"


def children(pid):
    """The processes that a process has started and that live, without those that wait for later estimates."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            waits = b'"waits": true' in file.with_name("cmdline").read_bytes()  # for later estimates
            found += [int(file.parent.name)] if int(parent) == pid and state != "Z" and not waits else []
    return found


def test_a_cancelled_jobs_estimate_is_killed_and_others_restart(home):
    home.options = ["--virtual", "1xA100-40GB"]
    home.start()
    (home.work / "train.py").write_text("import time; time.sleep(1000)")
    job = {"command": [sys.executable, "train.py"], "memory": None, "env": home.environment(), "hold": True}
    number, other = home.submit(**job), home.submit(**job)
    home.until(lambda: children(home.process.pid), "the process of the estimate")
    assert home.job(number)["estimating"].startswith("is being estimated, for ")
    assert home.job(other)["estimating"] == "waits for the estimate of another job that runs the same"
    home.client.call("cancel", jobs=[other])
    home.kill()
    home.start()
    home.until(lambda: children(home.process.pid), "the process of the estimate, again")
    assert home.job(number)["estimating"].startswith("is being estimated, for ")
    home.client.call("cancel", jobs=[number])
    home.until(lambda: not children(home.process.pid), "the process to be gone")


def test_a_job_without_an_estimate_is_queued_with_a_note(common):
    number = common.script("true", memory=None, estimator="ullage")
    assert common.job(number)["estimate"] == "not estimated: no Python script or model in it (--memory tells how much)"
    assert common.wait(number)["attempts"][0]["exclusive"]
    assert common.job(common.script("true", memory=None))["estimate"] == "not estimated: this site wants none"


def make(request, **rules):
    """The answer to one estimate."""
    return make_all([request], **rules)[0][1]


def make_all(requests, **rules):
    """The answers to several, as they come, each with the jobs that it is for. Jobs are numbered from 1."""
    answers = []

    async def run():
        estimates = Estimates(EstimateSettings(**rules), lambda jobs, request, answer: answers.append((jobs, answer)))
        for job, request in enumerate(requests, 1):
            estimates.want(job, request)
        while estimates.wanted:
            await asyncio.sleep(0.01)
        await estimates.close()

    asyncio.run(run())
    return answers


NOTHING = EstimateRequest(
    key="nothing to ask, which is answered without PyTorch",
    uid=0,
    estimator="ullage",
    questions=[],
    gpus=["T4"],
    env=dict(os.environ),
    cwd="/",
    conda=None,
    rights={},
)


def asked(tmp_path, text, **more):
    (tmp_path / "train.py").write_text(text)
    question = EstimateQuestion("train.py")
    return dataclasses.replace(NOTHING, key=text, questions=[question], cwd=str(tmp_path), **more)


def test_limits_and_failures_of_the_process_are_reported(tmp_path):
    answer = make(asked(tmp_path, "import time; time.sleep(1000)"), memory=1 << 20)
    assert (answer.upper, answer.note) == (None, "not estimated: it took more than 1.00 MiB of this machine's memory")
    missing = dataclasses.replace(NOTHING, cwd=str(tmp_path / "nowhere"))
    assert make(missing).note == f"not estimated: cannot enter the folder {tmp_path}/nowhere: No such file or directory"
    no_conda = dataclasses.replace(NOTHING, conda="nosuch")
    assert "there is no conda environment named 'nosuch'" in make(no_conda).note


def test_a_summary_is_read_without_the_jobs_environment(tmp_path):
    layers = "".join(f"{f'Linear-{place}':>20} {'[-1, 100]':>25} {'10,100':>15}\n" for place in (1, 2))
    (tmp_path / "net.model").write_text(f"{layers}Total params: 20,200\n")
    summary = EstimateQuestion("net.model", options={"batch_size": 64})
    request = asked(tmp_path, "", estimator="gpumemnet", conda="nosuch")
    answer = make(dataclasses.replace(request, questions=[summary, *request.questions]))
    assert (answer.upper, answer.note) == (1 << 30, "estimated by gpumemnet for T4")
    (tmp_path / "net.model").write_text(f"{layers}Total params: 20,300\n")
    refused = make(dataclasses.replace(request, questions=[summary])).note
    assert "20,300 parameters, but they have 20,200" in refused


SUMMARIZED = {"command": ["true"], "cwd": "/", "model": "/nowhere/net.model"}


def test_a_recorded_figure_is_promised_without_an_estimate(make_here, monkeypatch):
    Answers(monkeypatch, lambda: 1 << 30)
    here = make_here(estimating={"estimator": "gpumemnet"})
    job = SUMMARIZED | {"recorded": {"gpumemnet": 3 << 30, "horus": 4 << 30}}
    number = here.call("submit", job=job, key="a recorded figure")["jobs"][0]
    found = here.until_over(number)
    assert (found["promise"], found["estimate"]) == (3 << 30, "recorded by gpumemnet in its job file")
    fresh = here.call("submit", job=job | {"estimator": "gpumemnet"}, key="a fresh figure")["jobs"][0]
    assert here.until_over(fresh)["estimate"] == "estimated by gpumemnet for A100-40GB"
    other = here.call("submit", job=job | {"recorded": {"faketensor": 1}}, key="a figure of another")["jobs"][0]
    assert here.until_over(other)["promise"] == 1 << 30


def test_the_class_of_a_jobs_activity_counts_in_placement(make_here, monkeypatch, tmp_path):
    Answers(monkeypatch, lambda: 1 << 30, activity={"smact": {"least": 0.9, "most": 1.0}})
    here = make_here(estimating={"estimator": "gpumemnet", "activity": "gpuutilnet"})
    number = here.call("submit", job=SUMMARIZED | {"hold": True}, key="a busy job")["jobs"][0]
    here.until(lambda: here.job(number)["estimate"], "its estimate")
    assert here.job(number)["estimate"].endswith("for A100-40GB, SMACT about 95% by its class")
    assert here.daemon.context.works.busy(here.daemon.context.store.job(number).work) == pytest.approx(0.95)
    with pytest.raises(UnknownName, match="no estimator named 'gpuutil'"):
        make_daemon(tmp_path, read_settings(None, estimating={"activity": "gpuutil"}), print)


def test_a_summary_has_classes_of_activity_beside_its_memory(tmp_path):
    layers = "".join(f"{f'Linear-{place}':>20} {'[-1, 100]':>25} {'10,100':>15}\n" for place in (1, 2))
    (tmp_path / "net.model").write_text(f"{layers}Total params: 20,200\n")
    question = EstimateQuestion("net.model", options={"batch_size": 64})
    request = dataclasses.replace(NOTHING, questions=[question], cwd=str(tmp_path), estimator="horus")
    assert make(request, activity="gpuutilnet").smact in (0.1, 0.45, 0.85)  # the middle of a class of MLPs
    assert make(request).smact is None


def test_a_job_whose_summary_is_refused_does_not_start(make_here, monkeypatch):
    Answers(monkeypatch, lambda: "a summary must have output shapes, and this one has none")
    here = make_here(virtual="2xA100-40GB", estimating={"estimator": "gpumemnet"})
    number = here.call("submit", job=SUMMARIZED | {"gpus": 2}, key="a refused summary")["jobs"][0]
    here.until(lambda: here.job(number)["state"] == "held", "the job to be held")
    assert here.job(number)["reason"].startswith("is held: a summary must have output shapes")
    assert here.job(number)["attempts"] == []


@pytest.fixture
def for_all_users(monkeypatch):
    """Processes of other users run a Python that they can run; the `PYTHONPATH` that it needs."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to act as another user")
    found = public_python()
    if found is None:
        pytest.skip("needs a Python that every user can run")
    monkeypatch.setattr(sys, "executable", found[0])
    monkeypatch.setattr("ullage.sandbox.spawn.HOME", found[1].partition(os.pathsep)[0])
    monkeypatch.setenv("PYTHONPATH", found[1])
    return found[1]


def test_an_estimate_goes_where_its_user_may_go(for_all_users):
    user = pwd.getpwnam("nobody")
    request = dataclasses.replace(
        NOTHING, env={"PYTHONPATH": for_all_users}, rights={"uid": user.pw_uid, "gid": user.pw_gid, "user": "nobody"}
    )
    assert make(request).note == "not estimated: there is nothing to estimate"
    with tempfile.TemporaryDirectory(dir="/tmp") as private:  # mode 700
        note = make(dataclasses.replace(request, cwd=private)).note
        assert note == f"not estimated: cannot enter the folder {private}: Permission denied"


# Answers in Ullage's place before anything of Ullage runs in that process.
PLANT = f"""
import os, sys
if "ullage.sandbox" in sys.orig_argv:
    channel = int(sys.orig_argv[sys.orig_argv.index("ullage.sandbox") + 2])
    os.write(channel, b'{json.dumps({"answer": answer_of(4096)})}\\n')
    os._exit(0)
"""


def test_a_user_who_plants_an_answer_fools_only_himself(for_all_users, make_home):
    folder = Path(tempfile.mkdtemp(prefix="ull", dir="/tmp"))
    folder.chmod(0o755)
    home = make_home(folder / "h")
    home.by_command, home.variables = True, {"PYTHONPATH": for_all_users}
    home.options = ["--virtual", "1xA100-40GB"]
    home.settings += f'[access]\ngroup = "{grp.getgrgid(pwd.getpwnam("nobody").pw_gid).gr_name}"\n'
    home.work.chmod(0o755)
    (home.work / "sitecustomize.py").write_text(PLANT)
    job = {"command": ["python3", "train.py"], "cwd": str(home.work), "conda": "nosuch", "hold": True}
    planted = {"PYTHONPATH": f"{home.work}{os.pathsep}{for_all_users}"}
    try:
        home.start()
        key = "what nobody plants"
        number = as_user(home, "submit", job=job | {"env": planted}, key=key)["ok"]["jobs"][0]
        home.until(lambda: home.job(number)["estimate"], "the planted estimate")
        assert home.job(number)["promise"] == 4096
        other = home.submit(**job, memory=None, env={"PYTHONPATH": for_all_users})
        home.until(lambda: home.job(other)["estimate"], "the other's estimate")
        assert "environment named 'nosuch'" in home.job(other)["estimate"] and home.job(other)["promise"] is None
    finally:
        home.close()
        shutil.rmtree(folder, ignore_errors=True)


def user_asks(number, uid):
    return dataclasses.replace(NOTHING, key=f"estimate {number} of user {uid}", uid=uid)


def test_users_take_turns(tmp_path):
    """Four of one user came first; the other's waits for one of them only."""
    requests = [user_asks(number, 1) for number in range(4)] + [user_asks(0, 2)]
    order = [jobs for jobs, _ in make_all(requests, at_once=1)]
    assert order == [[1], [5], [2], [3], [4]]


def test_one_user_leaves_room_for_another():
    async def run():
        estimates = Estimates(EstimateSettings(at_once=3, per_user=2), lambda *answer: None, idle=lambda: True)
        for number in range(4):
            estimates.want(number, user_asks(number, 1))
        assert "being estimated" in estimates.standing(1) and estimates.standing(9) is None
        assert [estimates.standing(job) for job in (2, 3)] == [
            f"waits to be estimated, as number {place} of 2" for place in (1, 2)
        ]
        estimates.want(5, user_asks(0, 2))
        assert "being estimated" in estimates.standing(5)
        estimates.want(6, user_asks(1, 2))
        assert estimates.standing(6) == "waits to be estimated, as number 1 of 3", "of the one who has fewer"
        await estimates.close()

    asyncio.run(run())


def test_equal_jobs_share_one_answer_and_others_have_their_own():
    before, same = user_asks(0, 1), user_asks(1, 1)
    other = dataclasses.replace(same, env={**same.env, "BATCH": "500000"})
    assert [jobs for jobs, _ in make_all([before, same, other, same], at_once=1)] == [[1], [2, 4], [3]]


def test_a_job_equal_to_one_in_estimation_compares_with_it():
    """It might have changed a file that was read before."""
    (first, answer), (second, kept) = make_all([NOTHING, NOTHING], at_once=2)
    assert (first, second) == ([1], [2]) and kept == dataclasses.replace(answer, cached=True)


def test_an_answer_is_valid_while_its_files_are_unchanged(tmp_path):
    request = dataclasses.replace(NOTHING, conda="mine", env={**NOTHING.env, "HOME": str(tmp_path)})
    answer = make(request)
    assert "no conda environment named 'mine'" in answer.note and answer.reads is not None
    again = dataclasses.replace(request, cached=[answer])
    assert make(again) == dataclasses.replace(answer, cached=True)
    (tmp_path / "elsewhere/mine/bin").mkdir(parents=True)
    (tmp_path / ".conda").mkdir()
    (tmp_path / ".conda/environments.txt").write_text(f"{tmp_path}/elsewhere/mine\n")
    assert "nothing to estimate" in make(again).note


@pytest.fixture
def begun(monkeypatch):
    """The processes of estimates, as they are begun."""
    found = []
    start = parent.start

    def remember(*args, **options):
        found.append(start(*args, **options))
        return found[-1]

    monkeypatch.setattr(parent, "start", remember)
    return found


async def first(begun):
    while not begun:
        await asyncio.sleep(0.01)
    return begun[0].pid


def looks_at(child):
    """A list that grows whenever the parent of a process looks at it."""
    looks, listen = [], child._listen
    child._listen = lambda *given: looks.append(1) or listen(*given)
    return looks


def test_an_estimate_that_is_given_up_ends(tmp_path, begun):
    answers = []

    async def run():
        work = Estimates(EstimateSettings(), lambda *answer: answers.append(answer))
        work.want(1, asked(tmp_path, "import time; time.sleep(1000)"))
        await first(begun)
        await work.close()

    asyncio.run(run())
    assert not answers and start_of(begun[0].pid) is None, "nobody is told, and nothing is left"


def test_an_estimate_ends_with_the_last_job_that_wants_it(tmp_path, begun):
    answers = []

    async def run():
        work = Estimates(EstimateSettings(at_once=1), lambda *answer: answers.append(answer))
        for job in (1, 2):
            work.want(job, asked(tmp_path, "import time; time.sleep(1000)"))
        work.want(3, NOTHING)
        pid = await first(begun)
        looks = looks_at(begun[0])
        work.give_up([1])
        seen = len(looks)
        while len(looks) < seen + 2 and start_of(pid) is not None:  # whether it is to end was asked in between
            await asyncio.sleep(0.01)
        assert start_of(pid) is not None and work.standing(3), "job 2 wants it still"
        work.give_up([2])
        while work.wanted:
            await asyncio.sleep(0.01)
        assert start_of(pid) is None
        await work.close()

    asyncio.run(run())
    assert [jobs for jobs, *_ in answers] == [[3]], "its place is the next one's"


@pytest.mark.parametrize(
    "answer",
    [
        answer_of(1 << 70, "T4"),
        answer_of(-1, "T4"),
        answer_of(True, "T4"),
        answer_of(1, "\x1b[2J"),
        answer_of(1, "T4", estimates=[]),
        {"upper": 1, "fits": True, "gpu": "T4"},
        {"held": 7},
        {"failed": ["\x1b[2J", None], "own": "no"},
    ],
)
def test_whatever_a_users_process_answers_is_a_job_with_a_note(monkeypatch, answer):
    monkeypatch.setattr("ullage.manager.core.estimates.run", lambda *args, **more: Outcome(answer=answer))
    earlier = EstimateAnswer(1, "earlier", reads=Reads({"/": "exists"}, {}))
    found = make(dataclasses.replace(NOTHING, cached=[earlier]))
    assert found.upper is None and found.note.startswith("not estimated: ") and found.note.isprintable()
    assert not found.own_failure and found.reads is None


def test_an_answer_without_its_estimates_says_why(monkeypatch):
    answer = answer_of(1 << 30, "T4", estimates=[])
    monkeypatch.setattr("ullage.manager.core.estimates.run", lambda *args, **more: Outcome(answer=answer))
    reason = make(NOTHING).shown({})["reason"]
    assert reason == "its process must answer with one estimate for each model of GPU (1), got 0"


@pytest.mark.slow
def test_a_foreign_estimator_reports_what_it_does_not_support(tmp_path):
    answer = make(asked(tmp_path, "", estimator="horus"))
    assert answer.upper is None and "horus" in answer.note


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python3.11", "-u", "-X", "dev", "train.py", "-m", "x"], ("train.py", ["-m", "x"], False, "python3.11", ())),
        (["/venv/bin/python", "-m", "train"], ("train", [], True, "/venv/bin/python", ())),
        (["./train.py", "--lr", "1"], ("./train.py", ["--lr", "1"], False, "./train.py", ())),
        (["torchrun", "--nproc_per_node", "1", "train.py"], ("train.py", [], False, "torchrun", ())),
        (["conda", "run", "-n", "x", "--live-stream", "python", "a.py"], ("a.py", [], False, "python", ("conda", "x"))),
        (["mamba", "run", "--prefix=/x", "torchrun", "a.py"], ("a.py", [], False, "torchrun", ("conda", "/x"))),
        (["uv", "run", "train.py", "-p", "1"], ("train.py", ["-p", "1"], False, "python", ("uv", "run"))),
        (["uv", "run", "-p", "python3.12", "-m", "a"], ("a", [], True, "python", ("uv", "run", "-p", "python3.12"))),
        (["uv", "run", "--script", "a.py"], ("a.py", [], False, "python", ("uv", "run"))),
        (["uv", "run", "--with", "x", "python", "a.py"], ("a.py", [], False, "python", ("uv", "run", "--with", "x"))),
        (["bash", "train.sh"], None),
        (["python", "-c", "1"], None),
        (["python"], None),
        (["torchrun", "--help"], None),
        (["conda", "run", "python", "a.py"], None),
        (["conda", "run", "-n", "x", "make"], None),
        (["uv", "run", "pytest"], None),
    ],
)
def test_the_script_of_a_command_is_found(command, found):
    said = script_of(command)
    assert (said and said[:5]) == found


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_the_python_of_a_command_is_found(tmp_path, other_python):
    def python(*command, **env):
        return python_of(script_of(command), {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **env}).path

    theirs = f"{other_python}/bin/python"
    assert python("python", "train.py", PATH=f"{other_python}/bin") == theirs
    assert python(theirs, "-m", "train") == theirs
    program(tmp_path / "torchrun", f"#!{theirs}\nfrom torch.distributed.run import main")
    assert python("torchrun", "train.py", PATH=str(tmp_path)) == theirs
    script = program(tmp_path / "train.py", "#!/usr/bin/env -S python -u\n")
    assert python(script, PATH=f"{other_python}/bin") == theirs
    (tmp_path / ".conda").mkdir()
    (tmp_path / ".conda/environments.txt").write_text(f"{other_python}\n")
    assert python("conda", "run", "-n", other_python.name, "python", "train.py") == theirs
    with pytest.raises(LookupError, match="no conda environment named 'nosuch'"):
        python("conda", "run", "-n", "nosuch", "python", "train.py")
    with pytest.raises(InvalidValue, match="there is no program python3.2"):
        python("python3.2", "train.py")
    with pytest.raises(InvalidValue, match="cannot ask uv"):
        python("uv", "run", "train.py")


UV = shutil.which("uv", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))


@pytest.mark.skipif(UV is None, reason="needs uv: pip install uv")
def test_uv_says_which_python_it_would_run(tmp_path, other_python, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.11"\n')
    (tmp_path / ".venv").symlink_to(other_python)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "cache")}
    found = python_of(script_of([UV, "run", "train.py"]), env)
    assert os.path.samefile(os.path.dirname(found.path), other_python / "bin")
    (tmp_path / "train.py").write_text("# /// script\n# dependencies = []\n# ///\n")
    with pytest.raises(InvalidValue, match="no environment for train.py yet; type: uv sync --script train.py"):
        python_of(script_of([UV, "run", "train.py"]), env)
    subprocess.run([UV, "sync", "--quiet", "--offline", "--script", "train.py"], env=env, check=True, timeout=60)
    assert python_of(script_of([UV, "run", "train.py"]), env).path.startswith(str(tmp_path / "cache"))
    with pytest.raises(InvalidValue, match="uv must know which Python it runs, but it says: "):
        python_of(script_of([UV, "run", "--no-such-option", "-m", "train"]), env)


def test_a_script_is_estimated_in_the_python_of_its_job(tmp_path, other_python):
    theirs = f"{other_python}/bin/python"
    request = asked(tmp_path, f"import sys\nassert sys.executable == {theirs!r}\nimport rich")
    answer = make(dataclasses.replace(request, questions=[EstimateQuestion("train.py", program=theirs)]))
    assert f"needs the package rich, which is not installed for {theirs}" in answer.note and answer.own_failure
    assert answer.reads is not None and any(path.startswith(str(other_python)) for path in answer.reads.files)


@pytest.mark.slow
def test_the_next_estimate_is_forked_from_a_process_that_waits(tmp_path, other_python):
    """In the Python of the job, which the first answer told; it is as private, and is told as the first one was."""
    theirs = f"{other_python}/bin/python"
    text = "import os, sys\nopen('made', 'x')\nraise ValueError('ullage.estimation.jobs.child' in sys.modules)"
    compiles = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    request = asked(tmp_path, text, env=compiles)
    requests = [
        dataclasses.replace(request, key=str(number), questions=[EstimateQuestion("train.py", program=theirs)])
        for number in range(2)
    ]
    notes = [answer.note for _, answer in make_all(requests, at_once=1)]
    why = "(line 3 of train.py: raise ValueError('ullage.estimation.jobs.child' in sys.modules))"
    forked = notes[1].startswith("not estimated: train.py fails: ValueError: True")
    if not forked and parent.run("os.path:split", {}, private=Sandbox(), cwd=str(tmp_path)).private != "overlays":
        pytest.skip("this system refuses namespaces or overlays")
    assert notes == [f"not estimated: train.py fails: ValueError: {seen} {why}" for seen in (False, True)]
    assert not (tmp_path / "made").exists()


def test_scripts_that_were_never_seen_are_forked(tmp_path):
    """Each in a folder of its own, from one process that waits."""
    text = "import sys\nraise ValueError('ullage.estimation.jobs.child' in sys.modules)"
    requests = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        question = EstimateQuestion("train.py", program=sys.executable)
        requests.append(dataclasses.replace(asked(tmp_path / str(number), text), key=str(number), questions=[question]))
    notes = [answer.note for _, answer in make_all(requests, at_once=2, per_user=2)]
    if parent.run("os.path:split", {}, private=Sandbox(), cwd=str(tmp_path)).private != "overlays":
        pytest.skip("this system refuses namespaces or overlays")
    assert all(note.startswith("not estimated: train.py fails: ValueError: True") for note in notes)


def test_a_key_is_one_users_and_follows_what_is_asked():
    def key(args=(), uid=1, gpus=("T4",), estimator="ullage", cwd="/home/ann", program="python", **more):
        return key_of(JobSpec(command=[program, "train.py", *args], cwd=cwd, **more), uid, estimator, gpus)

    assert key() == key() == key(env={"BATCH": "8"}), "variables and files are kept beside the answer"
    others = {key(["--b"]), key(uid=2), key(gpus=["H200"]), key(estimator="horus"), key(cwd="/tmp"), key(conda="x")}
    assert len(others | {key()}) == 7
    paths = [{"PATH": "/venv/bin:/bin"}, {"PATH": "/bin"}]
    assert len({key(env=env) for env in paths}) == 2, "another Python may run it"
    assert len({key(env=env, program="/bin/python3") for env in paths}) == 1


class Answers:
    """Stands in for the processes of estimates: at once, with what the test says about each list of arguments."""

    def __init__(self, monkeypatch, of_args, **more):
        self.asked, self._of_args, self._more = [], of_args, more
        monkeypatch.setattr("ullage.manager.core.estimates.run", self._run)

    def _run(self, entry, request, **more):
        args = request["questions"][0]["args"]
        self.asked.append(list(args))
        found = self._of_args(*args)
        if isinstance(found, str):
            return Outcome(answer={"failed": found, "own": True})
        return Outcome(answer=answer_of(found, **self._more))


def array(here, indices, **more):
    job = {"command": ["python", "train.py", "{index}"], "cwd": "/", "array": indices, "estimator": "ullage", **more}
    numbers = here.call("submit", job=job, key=f"an array of {len(indices)} at {time.monotonic()}")["jobs"]
    here.until(lambda: all(here.job(number)["estimate"] for number in numbers), "all estimates")
    return [here.job(number) for number in numbers]


def test_elements_that_agree_speak_for_the_rest_of_an_array(make_here, monkeypatch):
    answers = Answers(monkeypatch, lambda seed: (5 << 30) + int(seed))
    jobs = array(make_here(), list(range(1, 21)), hold=True)
    assert sorted(answers.asked) == [["1"], ["11"], ["20"]]
    assert [job["promise"] - (5 << 30) for job in jobs] == [1, *[20] * 9, 11, *[20] * 9]
    assert jobs[1]["estimate"] == (
        "estimated by ullage for A100-40GB (as elements 1, 11 and 20: the largest of 3 estimates)"
    )
    assert jobs[0]["estimate"] == "estimated by ullage for A100-40GB"


def test_a_sweep_that_changes_memory_is_estimated_job_by_job(make_here, monkeypatch):
    answers = Answers(monkeypatch, lambda batch: int(batch) << 30)
    jobs = array(make_here(), [1, 2, 4, 8, 16], hold=True)
    assert len(answers.asked) == 5 and [job["promise"] >> 30 for job in jobs] == [1, 2, 4, 8, 16]


def array_being_estimated(make_here, monkeypatch):
    """A daemon, an array of nine whose first estimate is under way, and an event that lets estimates end."""
    waits, going = threading.Event(), []

    def slowly(seed):
        going.append(seed)
        assert waits.wait(60)
        return 1 << 30

    Answers(monkeypatch, slowly)
    here = make_here()
    job = {"command": ["python", "train.py", "{index}"], "cwd": "/", "array": list(range(9)), "estimator": "ullage"}
    numbers = here.call("submit", job=job | {"hold": True}, key="an array of nine seeds")["jobs"]
    here.until(lambda: going, "the first estimate")
    return here, numbers, waits


def test_cancelled_sample_jobs_of_an_array_are_replaced(make_here, monkeypatch):
    here, numbers, waits = array_being_estimated(make_here, monkeypatch)
    chosen = [numbers[0], numbers[4], numbers[8]]
    here.call("cancel", jobs=chosen)
    here.until(lambda: not set(chosen).intersection(here.daemon.intake.estimates.wanted), "their estimates to end")
    waits.set()
    rest = numbers[1:4] + numbers[5:8]
    here.until(lambda: all(here.job(number)["estimate"] for number in rest), "the others' estimates")
    assert {here.job(number)["promise"] for number in rest} == {1 << 30}
    assert "elements 1, 3 and 7" in here.job(rest[1])["estimate"], "ends and middle of what is left"


def test_a_script_failing_by_itself_is_held_until_released(make_here, monkeypatch):
    Answers(monkeypatch, lambda: "train.py fails: ValueError: no such layer (line 3 of train.py)")
    here = make_here(estimating={"wait": True})
    job = {"command": ["python", "train.py"], "cwd": "/", "memory": None, "estimator": "ullage"}
    number = here.call("submit", job=job, key="a job that fails")["jobs"][0]
    here.until(lambda: here.job(number)["state"] == "held", "the job to be held")
    found = here.job(number)
    assert found["reason"] == (
        "is held: train.py fails: ValueError: no such layer (line 3 of train.py); "
        "'ullage edit --release' starts it all the same"
    )
    assert found["attempts"] == []
    later = here.call("submit", job=job | {"after": [f"any:{number}"]}, key="one that waits for it")["jobs"][0]
    here.until(lambda: here.job(later)["estimate"], "its estimate")
    assert here.job(later)["state"] != "held", "it may need what the other makes"
    here.call("release", jobs=[number])
    here.until(lambda: here.job(number)["attempts"], "an attempt")


def test_a_site_may_start_what_fails_when_it_is_estimated(make_here, monkeypatch):
    Answers(monkeypatch, lambda: "train.py fails: ValueError")
    here = make_here(estimating={"failed": "run", "wait": True})
    job = {"command": ["false"], "model": "x:y", "cwd": "/", "estimator": "ullage"}
    Answers(monkeypatch, lambda: "it fails")
    number = here.call("submit", job=job, key="a job that fails")["jobs"][0]
    assert here.until_over(number)["estimate"] == "not estimated: it fails"


def test_submit_reports_a_bug_of_the_script(make_here, monkeypatch, nursery, tmp_path):
    Answers(monkeypatch, lambda: "train.py fails: ValueError: no such layer")
    make_here(estimating={"wait": True})
    words = ["--estimator", "ullage", "--", "python", "train.py"]
    variables = os.environ | {"ULLAGE_HOME": str(tmp_path)}
    done = nursery.run(["submit", "--estimate-wait", "60s", *words], variables, str(tmp_path), "")
    assert done.returncode == 0 and "job 1: queued; its memory is being estimated" in done.stdout
    assert done.stderr.startswith("ullage: job 1 is held: train.py fails: ValueError: no such layer"), done.stderr
    waited = nursery.run(["submit", "--wait", *words], variables, str(tmp_path), "")
    assert waited.returncode == 1 and "is held" in waited.stderr


def test_an_edited_array_job_leaves_the_others_of_its_array(make_here, monkeypatch):
    here, numbers, waits = array_being_estimated(make_here, monkeypatch)
    assert "elements 0, 4 and 8" in here.daemon.intake.standing(here.daemon.context.store.job(numbers[1]))
    here.call("edit", jobs=[numbers[0], numbers[1]], changes={"memory": 3 << 30})
    here.call("edit", jobs=[numbers[4]], changes={"name": "another"})
    waits.set()
    here.until(lambda: all(here.job(number)["estimate"] for number in numbers), "all estimates")
    assert [here.job(number)["promise"] >> 30 for number in numbers] == [3, 3, 1, 1, 1, 1, 1, 1, 1]
