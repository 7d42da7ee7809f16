"""Releases of PyTorch: what each does in its own way, beside what its own compiled code says, and who is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ullage
from ullage.units import MIB
from ullage.virtual.operators.decompositions import AttentionArguments, choose_attention_kernel
from ullage.virtual.releases import RELEASES, followed, release_of

ORACLE = Path(__file__).parent / "release_oracle.py"
HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


def choice(release, capability=HOPPER, size=64, dropout=0.0, dtype=torch.bfloat16, groups=1, grad=False):
    query = torch.empty(2, 8, 128, size, dtype=dtype, requires_grad=grad)
    key = torch.empty(2, 8 // groups, 128, size, dtype=dtype, requires_grad=grad)
    arguments = AttentionArguments(query, key, key, None, dropout, False, groups > 1)
    return choose_attention_kernel(arguments, capability, release_of(release))


@pytest.mark.parametrize(
    ("release", "expected"),
    [("2.6", "flash"), ("2.8", "flash"), ("2.9", "flash"), ("2.10", "flash"), ("2.11", "cudnn"), ("2.15", "cudnn")],
)
def test_hopper_takes_cudnns_attention_since_it_is_trusted(release, expected):
    assert choice(release) == expected


def test_dropout_beyond_cudnn_falls_back_to_flash_attention():
    assert [choice(release, dropout=0.1) for release in ("2.11", "2.12")] == ["cudnn", "flash"]
    assert choice("2.12", dropout=0.125) == "cudnn"


def test_wide_heads():
    assert [choice(release, size=160, grad=True) for release in ("2.11", "2.14")] == ["cudnn", "flash"]
    assert [choice(release, size=256, grad=True) for release in ("2.11", "2.14")] == ["cudnn", "cudnn"]
    assert [choice(release, BLACKWELL, size=256) for release in ("2.11", "2.14")] == ["flash", "cudnn"]


def test_grouped_heads_in_single_precision():
    assert [choice(release, groups=4, dtype=torch.float32) for release in ("2.11", "2.14")] == ["math", "efficient"]


def kept_after_a_layer(monkeypatch, release):
    """Bytes that the libraries hold after a linear layer with bias, and the most at once."""
    monkeypatch.setenv("ULLAGE_PYTORCH", release)
    with ullage.virtual_gpu("H200"), torch.no_grad():
        layer, x = torch.nn.Linear(64, 64, device="cuda"), torch.zeros(8, 64, device="cuda")
        before = torch.cuda.memory_allocated()
        y = layer(x)
        del y
        after_bias = torch.cuda.memory_allocated() - before
        z = x @ x.t()
        del z
        return after_bias, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() > 32 * MIB


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("2.6", (32 * MIB, 32 * MIB, True)),  # cuBLASLt's is given back after each product
        ("2.8", (32 * MIB, 32 * MIB, True)),
        ("2.9", (33 * MIB, 33 * MIB, True)),  # it has one of its own and keeps it
        ("2.11", (33 * MIB, 33 * MIB, True)),
        ("2.12", (32 * MIB, 32 * MIB, True)),  # it uses cuBLAS's
        ("2.15", (0, 0, True)),  # all are given back
    ],
)
def test_workspaces_of_matrix_products_stay_or_go(monkeypatch, release, expected):
    assert kept_after_a_layer(monkeypatch, release) == expected


def test_another_release_than_the_installed_one_can_be_followed(monkeypatch):
    monkeypatch.setenv("ULLAGE_PYTORCH", "2.8")
    assert followed("2.13.0", True).name == followed("2.13.0", False).name == "2.8"
    monkeypatch.setenv("ULLAGE_PYTORCH", "2.5")
    with pytest.raises(ullage.UllageError, match="one of 2.6, 2.7, .*got '2.5'"):
        followed("2.13.0", True)


@pytest.mark.parametrize(("release", "version"), [("2.6", 12040), ("2.11", 13000), ("2.15", 13020)])
def test_the_version_of_cuda_is_that_of_the_release(monkeypatch, release, version):
    monkeypatch.setenv("ULLAGE_PYTORCH", release)
    with ullage.virtual_gpu("H200"):
        assert torch._C._cuda_getCompiledVersion() == version


def test_a_build_for_cpus_is_followed_by_what_was_measured(monkeypatch):
    monkeypatch.delenv("ULLAGE_PYTORCH", raising=False)
    assert [followed("2.13.0", on_gpus).name for on_gpus in (True, False)] == ["2.13", "2.11"]
    assert [followed("2.8.0", on_gpus).name for on_gpus in (True, False)] == ["2.8", "2.8"]
    assert followed("2.99", False).name == "2.11"


def test_an_unknown_release_is_reported(monkeypatch):
    monkeypatch.delenv("ULLAGE_PYTORCH", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with ullage.virtual_gpu("H200") as gpu:
        pass
    newest = RELEASES[-1].name
    assert gpu.notes == [f"PyTorch 2.99.0 is newer than this Ullage: it is followed by the rules of {newest}"]


def installed(folder, version):
    """A folder for PYTHONPATH with a PyTorch of this version, which must not be imported; none hides every PyTorch."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('PyTorch was imported')")
    described = folder / f"torch-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


@pytest.mark.parametrize(
    "command", ["estimate torchvision:resnet18", "estimate SCRIPT", "max-batch torchvision:resnet18"]
)
def test_too_old_a_pytorch_is_refused_in_one_line(tmp_path, monkeypatch, command):
    script = tmp_path / "train.py"
    script.write_text("print('the script ran')")
    installed(tmp_path, "2.5.1")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(ullage.__file__).parent.parent}")
    arguments = command.replace("SCRIPT", str(script)).split()
    program = f"import sys; sys.argv[1:] = {arguments!r}; from ullage.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    wanted = f"{sys.executable} -m pip install 'torch>=2.6'"
    assert done.stderr == f"ullage: PyTorch must be 2.6 or newer; {sys.executable} has 2.5.1. Type: {wanted}\n"


def test_without_pytorch_it_says_what_to_type():
    hide = "import sys, importlib.util as u; find = u.find_spec; "
    hide += "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)"
    program = f"{hide}; sys.argv[1:] = ['estimate', 'torchvision:resnet18']; from ullage.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    wanted = f"{sys.executable} -m pip install torch"
    assert done.stderr == f"ullage: PyTorch must be installed; {sys.executable} has none. Type: {wanted}\n"


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL, AMPERE, (8, 9), (12, 0), (7, 5)])
def test_the_installed_releases_own_code_chooses_the_same(capability):
    """The compiled chooser of this very PyTorch is asked for a card of this kind, in a process of its own."""
    if torch.version.cuda is None or sys.platform != "linux" or torch.cuda.is_available():
        pytest.skip("needs a PyTorch built for CUDA, on Linux, and no GPU")
    if capability[0] >= 10 and torch.version.cuda.startswith("12.4"):
        pytest.skip("needs a PyTorch built for CUDA 12.6 or newer: CUDA 12.4 knows no Blackwell")
    done = subprocess.run(
        [sys.executable, str(ORACLE), *map(str, capability)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["asked"] > 100 and answer["different"] == []
    assert answer["workspace"] in (None, release_of(torch.__version__).cublas_workspace_size(capability))
