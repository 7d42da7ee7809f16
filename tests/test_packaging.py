"""What `pip install .` installs, what its extras add, and how large it is."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests import install

from ullage.errors import EXTRAS, LABS, MissingPackage

ROOT = Path(__file__).parents[1]
LAB = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL_BUDGET = 21_600_000  # bytes; convolutions take 17.5 MB of it (table, network, trees)
WEIGHTS_BUDGET = 4 << 20  # bytes, within that: weights that only the learned estimators read
SHORT_NAMES = {
    "prometheus-client": "prometheus_client",
    "scikit-learn": "sklearn",
    "nvidia-ml-py": "pynvml",
    "tree-sitter": "tree_sitter",
    "tree-sitter-bash": "tree_sitter_bash",
}

# Run by every Python process of a test: the packages of the extras cannot be found. typer itself asks for pydantic.
REFUSE = f"""
from importlib import metadata
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_others(name, path=None, target=None):
    if name.partition(".")[0] not in {sorted({*EXTRAS, *LABS} - {"pydantic"})!r}:
        return find_spec(name, path, target)

PathFinder.find_spec = staticmethod(find_others)

entry_points = metadata.entry_points

def find_none(**which):
    return () if which.get("group", "").startswith("ullage.") else entry_points(**which)

metadata.entry_points = find_none
"""


def packages(requirements: list[str]) -> set[str]:
    names = {requirement.partition(">")[0].partition("[")[0].strip() for requirement in requirements}
    return {SHORT_NAMES.get(name, name) for name in names}


def without_extras(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "refuse").mkdir()
    (tmp_path / "refuse" / "sitecustomize.py").write_text(REFUSE)
    path = os.pathsep.join(filter(None, [str(tmp_path / "refuse"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "ullage", *words]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)


def test_every_optional_package_is_in_the_extra_of_its_message() -> None:
    assert packages(PROJECT["dependencies"]) == {"torch", "numpy", "rich", "safetensors", "typer"}
    extras = PROJECT["optional-dependencies"]
    assert packages(LAB["dependencies"]) == {*LABS, "ullage==0.1.0", "psutil"} - {"ullage_lab"}
    for package, extra in EXTRAS.items():
        assert package in packages(extras[extra])
    assert str(MissingPackage("polars", "data sets")).endswith("type: pip install ./lab  # in a clone of Ullage")


def test_an_estimate_needs_no_extra(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(4, 64, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    done = without_extras(tmp_path, "estimate", str(script), "--gpu", "T4", "--json")
    assert done.returncode == 0, done.stderr
    assert '"fits": true' in done.stdout


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["serve", "--virtual", "2xT4"], "manager"),
        (["top", "--once"], "manager"),
    ],
)
def test_a_missing_extra_is_one_line_that_says_what_to_type(tmp_path: Path, words: list[str], extra: str) -> None:
    done = without_extras(tmp_path, *words)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"type: pip install '.[{extra}]'  # in a clone of Ullage" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["lab"],
        ["lab", "train", "fast", "--data", "x"],
        ["estimate", "torchvision:resnet18", "--estimator", "dnnperf"],
        ["estimate", "ullage_lab.networks.generated:mlp"],
    ],
)
def test_commands_of_the_lab_report_that_it_is_missing(tmp_path: Path, words: list[str]) -> None:
    done = without_extras(tmp_path, *words)
    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1 and "pip install ./lab  # in a clone of Ullage" in done.stderr, done.stderr


def test_the_wheel_is_whole_and_keeps_its_budget(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    inside = {entry.filename: entry.compress_size for entry in zipfile.ZipFile(wheel).infolist()}
    for file in (ROOT / "src" / "ullage").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert str(file.relative_to(ROOT / "src")) in inside
    assert wheel.stat().st_size <= WHEEL_BUDGET
    assert sum(size for name, size in inside.items() if "/estimators/data/" in name) <= WEIGHTS_BUDGET


def test_uv_is_given_the_settings_of_pip() -> None:
    lines = [
        "global.extra-index-url='file:///one https://two'",
        "global.find-links='/old'",
        "global.quiet='1'",
        ":env:.find-links='/wheels\\n/more'",
        ":env:.cert='/ca.crt'",
    ]
    assert install.settings_of(lines) == {
        "UV_EXTRA_INDEX_URL": "file:///one https://two",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/ca.crt",
    }


@pytest.mark.parametrize("failing", ["pip install uv", "uv pip install"])
def test_without_uv_pip_installs_the_same_with_pytorch_first(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        words = [word for word in command[2:] if word not in (*install.CONSTRAINTS, "--no-compile")]
        commands.append(words)
        return subprocess.CompletedProcess(command, int(" ".join(words).startswith(failing)), "", "")

    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", run)
    wanted = ["--editable", ".[dev]"]
    assert not install.with_uv("python", wanted)
    assert install.with_pip("python", wanted) == 0
    assert commands[-2:] == [["pip", "install", "torch"], ["pip", "install", *wanted]]
