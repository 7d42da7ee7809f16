"""Each room has a budget of lines, and tests/sizes.py fails a room that is above it."""

import doctest
import shutil
import subprocess
import sys

import pytest
from tests import sizes


@pytest.fixture
def project(tmp_path):
    """A small project with one room of 10 raw lines, and the script."""
    room = tmp_path / "src" / "ullage" / "room"
    room.mkdir(parents=True)
    (room / "module.py").write_text("x = 1\n" * 10)
    (tmp_path / "tests").mkdir()
    shutil.copy(sizes.__file__, tmp_path / "tests")
    return tmp_path


def run(project, *arguments):
    return subprocess.run(
        [sys.executable, project / "tests" / "sizes.py", *arguments], capture_output=True, text=True, check=False
    )


def test_docstring_examples():
    results = doctest.testmod(sizes)
    assert results.attempted and not results.failed


def test_a_room_above_its_budget_fails(project):
    assert run(project, "--lower").returncode == 0
    assert '"ullage/room" = [10, 10]' in (project / "budget.toml").read_text()
    (project / "src" / "ullage" / "room" / "more.py").write_text('"""Words."""\n')
    grown = run(project)
    assert grown.returncode == 1
    assert "ullage/room has 11 raw lines, and its budget is 10" in grown.stderr


def test_lower_never_raises(project):
    run(project, "--lower")
    (project / "src" / "ullage" / "room" / "more.py").write_text("y = 1\n")
    assert run(project, "--lower").returncode == 1
    assert '"ullage/room" = [10, 10]' in (project / "budget.toml").read_text()


def test_a_room_without_a_budget_fails(project):
    run(project, "--lower")
    (project / "src" / "ullage" / "other").mkdir()
    (project / "src" / "ullage" / "other" / "module.py").write_text("y = 1\n")
    assert "ullage/other has 1 code lines, and its budget is 0" in run(project).stderr


def test_against_a_commit(project):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=project, check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (project / "src" / "ullage" / "room" / "more.py").write_text("y = 1\n")
    line = next(line for line in run(project, "--against", "HEAD").stdout.splitlines() if "ullage/room" in line)
    assert line.split() == ["ullage/room", "10", "10", "11", "11", "+1", "+1"]
