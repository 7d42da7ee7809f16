"""A child of another user has that user's rights from its first instruction. As root, with two users of this system."""

import json
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from tests.paths import public_python

ANN, BOB = "games", "daemon"
RUN = """
import json, sys
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.parent import run
from ullage.sandbox.worker_pool import WorkerPool
order = json.loads(sys.argv[1])
private = None if order["private"] is None else Sandbox(**order["private"])
outcome = run("children:" + order["name"], order["request"], env=order["env"], cwd=order["cwd"],
              rights=order["rights"], private=private, warm=WorkerPool([]) if order["forked"] else None)
print(json.dumps([outcome.answer, outcome.failure, outcome.private, outcome.output]))
"""
PRIVATE = {"overlays": {}, "forked": {}, "redirection": {"overlays": False, "namespaces": False}, "open": None}


@pytest.fixture(scope="module")
def code():
    """A folder that every user can enter, with what the children do."""
    with tempfile.TemporaryDirectory(prefix="ull", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        shutil.copy(Path(__file__).with_name("children.py"), folder)
        yield folder


@pytest.fixture(params=PRIVATE)
def as_user(request, code):
    """Run a child as a user; what came of it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to run as another user")
    if public_python() is None:
        pytest.skip("no Python here that other users can run")
    python, path = public_python()

    def call(user, function, cwd, env=(), **values):
        known = pwd.getpwnam(user)
        order = {
            "name": function,
            "request": values,
            "cwd": str(cwd),
            "private": PRIVATE[request.param],
            "forked": request.param == "forked",
            "rights": {"uid": known.pw_uid, "gid": known.pw_gid, "user": user},
            "env": {"PYTHONPATH": f"{path}:{code}", "HOME": "/tmp", **dict(env)},
        }
        done = subprocess.run(
            [python, "-c", RUN, json.dumps(order)],
            env={"PYTHONPATH": path},
            capture_output=True,
            text=True,
            cwd="/root",
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    call.mode = request.param
    return call


FILES = ("results.csv", "last.pt", "old.pt", "a.txt", "runs/0/log", "kept/0/log")


def make_project(folder, user, group):
    """A folder with files of a user."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    for path in folder.rglob("*"):
        os.chown(path, pwd.getpwnam(user).pw_uid, pwd.getpwnam(group).pw_gid)


@pytest.fixture
def homes():
    """A home for each user, closed to everybody else."""
    folder = Path(tempfile.mkdtemp(prefix="ull", dir="/tmp"))
    folder.chmod(0o755)
    for user in (ANN, BOB):
        make_project(folder / user / "project", user, user)
        for path in (folder / user, folder / user / "project"):
            os.chown(path, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
        (folder / user).chmod(0o700)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_that_the_user_cannot_enter_is_not_entered(as_user, homes):
    answer, failure, _, _ = as_user(BOB, "where", homes / ANN / "project")
    assert answer is None
    assert failure == f"cannot enter the folder {homes / ANN / 'project'}: Permission denied"


def test_a_child_has_the_rights_of_its_user(as_user, homes):
    answer, _, private, _ = as_user(ANN, "where", homes / ANN / "project")
    assert (private is None) == (as_user.mode == "open")
    assert answer["folder"] == str(homes / ANN / "project") and answer["user"] == pwd.getpwnam(ANN).pw_uid
    assert 0 not in answer["groups"] and answer["capabilities"] == 0
    assert answer["forked"] == (as_user.mode == "forked" and private == "overlays")
    _, failure, _, _ = as_user(ANN, "reads_one", homes / ANN / "project", file=str(homes / BOB / "project/last.pt"))
    assert failure.startswith("PermissionError")


def test_code_of_the_user_never_runs_as_root(as_user, homes, code):
    """Variables of the user name code that every Python runs at its start."""
    (homes / "sitecustomize.py").write_text("import os; print('I am', os.getuid())")
    env = {"PYTHONPATH": f"{homes}:{public_python()[1]}:{code}"}
    answer, failure, _, output = as_user(ANN, "where", homes / ANN, env)
    assert answer is not None, failure
    assert {line for line in output.splitlines() if line.startswith("I am")} == {f"I am {pwd.getpwnam(ANN).pw_uid}"}


@pytest.mark.parametrize(
    ("place", "group"),
    [(f"{ANN}/project", ANN), ("shared", ANN), ("shared/of_others/mine", ANN), ("shared", BOB)],
    ids=["own folder", "folder of others", "own folder in one of others", "files of another group"],
)
def test_a_users_files_can_be_changed_and_stay_as_they_are(as_user, homes, place, group):
    if as_user.mode == "open":
        return
    folder = homes / place
    folder.mkdir(parents=True, exist_ok=True)
    make_project(folder, ANN, group)
    folder.chmod(0o777)
    answer, failure, _, output = as_user(ANN, "changes_files", folder, name="zz-ullage")
    assert answer is not None and answer["rows"] == "results.csv\nmine\n", (failure, output)
    files = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert files == {name: f"{name}\n" for name in FILES} and not Path("/tmp/zz-ullage").exists()
