"""A script runs in the Python that its user names, which has PyTorch and not Ullage."""

import os
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from tests.scripts import estimate_script

from ullage.cli.options import request_from
from ullage.errors import InvalidValue, MissingPackage, ScriptFailed
from ullage.sandbox.interpreter import active_environment, environment_with, find_interpreter
from ullage.virtual.cudnn import workspaces

TRAINING = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(10):
    optimizer.zero_grad(); model(torch.randn(8, 512, device="cuda")).sum().backward(); optimizer.step()
"""
ALONE = """
import importlib.util, os, sys
assert os.path.samefile(sys.prefix, {prefix!r}), sys.prefix
for name in ("numpy", "rich", "typer", "pydantic", "safetensors", "tomli", "neighbour"):
    assert importlib.util.find_spec(name) is None, name
assert not [place for place in sys.path if os.path.isdir(os.path.join(place, "ullage"))], sys.path
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path / "train.py"


def site_packages(folder):
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


def test_it_runs_in_another_environment_with_nothing_of_ours(script, other_python, estimated):
    here = estimated(TRAINING)
    script.write_text(ALONE.format(prefix=str(other_python)) + TRAINING)
    there = estimate_script("train", module=True, python=other_python)  # a module that only that Python finds
    assert (there.peak_allocated, there.peak_reserved) == (here["peak_allocated"], here["peak_reserved"])
    assert f"the script ran in {other_python}/bin/python" in there.notes


def test_convolutions_say_that_they_need_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MissingPackage, match="estimates of convolutions need the package numpy"):
        workspaces.table.__wrapped__(Path())


@pytest.fixture
def empty(tmp_path):
    venv.create(tmp_path / "empty", symlinks=True)
    return tmp_path / "empty"


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


# A Python that says that it is of another version.
OLD = """#!/bin/sh
exec {python} -c "
import runpy, sys
sys.version_info, sys.argv = (3, 9, 2, 'final', 0), sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
" "$@"
"""


def test_an_unsuitable_python_is_refused_before_a_run(script, tmp_path, empty):
    script.write_text("raise SystemExit('the script has run')")
    old = program(tmp_path / "old", OLD.format(python=sys.executable))
    cases = {
        "nowhere/bin/python": f"a Python must be a program; there is no file {tmp_path}/nowhere/bin/python",
        "train.py": f"a Python must be a program; {tmp_path}/train.py is not one",
        ".": f"a Python must be a program; there is no file {tmp_path}/bin/python",
        "/bin/ls": "train.py: /bin/ls must be Python 3.11 or newer",
        "no-such-env": "or the name of a conda environment, got 'no-such-env'",
        old: f"train.py: Python must be 3.11 or newer; {sys.executable} is Python 3.9.2",
        str(empty): f"train.py: PyTorch must be installed; {empty}/bin/python has none. Type: {empty}/bin/python -m",
    }
    for named, told in cases.items():
        with pytest.raises((InvalidValue, ScriptFailed)) as failure:
            estimate_script("train.py", python=named)
        assert told in str(failure.value) and "\n" not in str(failure.value)


def test_a_pytorch_that_is_too_old_is_reported(script, empty):
    (site_packages(empty) / "torch").mkdir()
    (site_packages(empty) / "torch/__init__.py").write_text("raise SystemExit('PyTorch was imported')")
    (site_packages(empty) / "torch-2.1.2.dist-info").mkdir()
    (site_packages(empty) / "torch-2.1.2.dist-info/METADATA").write_text("Name: torch\nVersion: 2.1.2\n")
    with pytest.raises(ScriptFailed, match=f"PyTorch must be 2.6 or newer; {empty}/bin/python has 2.1.2"):
        estimate_script("train.py", python=empty)


def test_an_environment_is_a_folder_a_conda_name_or_a_command(tmp_path, empty, monkeypatch):
    assert find_interpreter(str(empty)).path == f"{empty}/bin/python"
    assert not find_interpreter(str(empty)).is_ours and find_interpreter(sys.executable).is_ours
    (tmp_path / ".conda").mkdir()
    (tmp_path / ".conda/environments.txt").write_text(f"{empty}\n")
    found = find_interpreter("empty", {"HOME": str(tmp_path), "PATH": "/usr/bin"})
    assert found.path == f"{empty}/bin/python" and found.env["CONDA_PREFIX"] == str(empty)
    assert find_interpreter("python3", {"PATH": f"{empty}/bin"}).path == f"{empty}/bin/python3"


def test_a_command_uses_the_environment_that_is_active(script, other_python, empty, monkeypatch):
    def python_of(source, **options):
        script = request_from(source, **options).script
        return script and script.python

    assert python_of("train.py") is None
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.setenv(name, str(other_python))
        assert python_of("train.py") == str(other_python) and python_of("torchvision:resnet18") is None
        assert python_of("train.py", python="mine") == "mine"
        monkeypatch.delenv(name)
    assert active_environment({"VIRTUAL_ENV": str(empty)}) is None, "it has no PyTorch"
    assert active_environment({"VIRTUAL_ENV": sys.prefix, "CONDA_PREFIX": str(other_python)}) is None, "it is ours"
    both = {"VIRTUAL_ENV": str(empty), "CONDA_PREFIX": str(other_python)}
    assert active_environment({**both, "PATH": f"/bin:{other_python}/bin:{empty}/bin"}) == str(other_python)
    assert active_environment({**both, "PATH": f"/bin:{empty}/bin:{other_python}/bin"}) is None
    with pytest.raises(InvalidValue, match="'python' is an option for a script"):
        python_of("torchvision:resnet18", python="mine")


@pytest.mark.slow
def test_a_missing_package_names_the_environment_that_has_it(script, tmp_path):
    script.write_text("import torch\nimport wanted")
    venv.create(tmp_path / ".venv", symlinks=True)
    (site_packages(tmp_path / ".venv") / "wanted.py").touch()
    with pytest.raises(ScriptFailed) as failure:
        estimate_script("train.py")
    assert f"the package wanted, which is not installed for {sys.executable}" in str(failure.value)
    assert f"{tmp_path}/.venv has it; type: ullage estimate train.py --python {tmp_path}/.venv" in str(failure.value)


def test_an_environment_is_searched_up_to_the_repositorys_root(tmp_path):
    venv.create(tmp_path / ".venv", symlinks=True)
    (site_packages(tmp_path / ".venv") / "wanted").mkdir()
    (tmp_path / "a/b").mkdir(parents=True)
    assert environment_with("wanted", str(tmp_path / "a/b/train.py"), {}) == str(tmp_path / ".venv")
    (tmp_path / "a/.git").mkdir()
    assert environment_with("wanted", str(tmp_path / "a/b/train.py"), {}) is None
    assert environment_with("wanted", "train.py", {"VIRTUAL_ENV": str(tmp_path / ".venv")}) == os.fspath(
        tmp_path / ".venv"
    )
