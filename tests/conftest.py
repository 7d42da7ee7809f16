"""What tests of several rooms share: reference data and a browser.

Some tests compare with data that is not part of this project. `ULLAGE_REFERENCE` names a folder that holds it; see
tests/README.md.
"""

import contextlib
import gc
import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

# What is recorded here was recorded with PyTorch 2.11, so tests follow its rules whichever PyTorch they run with.
os.environ.setdefault("ULLAGE_PYTORCH", "2.11")
# Workers and their processes share few cores: threads of their own would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.skips", "tests.workers"]

HERE = Path(__file__).parent
SHIPPED = HERE / "data" / "reference"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

collect_ignore = ["virtual/triton_kernels.py"]  # for a machine with Triton and a GPU, be it a virtual one

# Scripts run in the environment that is active in the user's shell; the tests say themselves which one that is.
for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
    os.environ.pop(name, None)

# A machine may pause at any moment. "quick" is for properties that do not say themselves how many examples: else 100.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
settings.register_profile("quick", settings.get_profile("patient"), max_examples=20)


# pytest rewrites the assertions of packages with a plugin, so that they tell more: half of Ullage's modules would be
# compiled by each worker once more, and none of them is a test.
for _finder in sys.meta_path:
    getattr(_finder, "_must_rewrite", set()).discard("ullage")

gc.disable()  # until all is imported: nothing of it is garbage


def pytest_collection_finish():
    """All is imported."""
    global _grown
    gc.enable()
    gc.freeze()
    _grown = psutil.Process().memory_info().rss


_thaw, _grown = gc.unfreeze, 0


def _thaw_what_grew():
    """A virtual GPU gives back to the garbage collector what it spared, and with it all that a worker has imported.

    Here that stays spared until the process has grown by 256 MiB: to look at all of it takes a second.
    """
    global _grown
    if psutil.Process().memory_info().rss > _grown + (256 << 20):
        _thaw()
        gc.collect()
        gc.freeze()
        _grown = psutil.Process().memory_info().rss


gc.unfreeze = _thaw_what_grew


@pytest.fixture(scope="module", autouse=True)
def _spared_collector():
    """What is there when a file begins stays: the garbage collector need not look at it again and again."""
    gc.freeze()


@pytest.fixture(scope="session")
def other_python(tmp_path_factory):
    """The folder of an environment that has PyTorch and what PyTorch needs, and nothing else: no Ullage, no NumPy."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for package in _needed_by("torch"):
        for top in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
            with contextlib.suppress(FileExistsError):
                (packages / top).symlink_to(package.locate_file(top))
    return folder


def _needed_by(name, seen=None):
    """An installed package and all that it needs."""
    seen = {} if seen is None else seen
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        seen[name] = importlib.metadata.distribution(name)
        for line in seen[name].requires or ():
            needed = re.match(r"[\w.-]+", line)[0]
            if "extra ==" not in line and needed not in seen:
                _needed_by(needed, seen)
    return seen.values()


@pytest.fixture(scope="session")
def _warm_processes():
    from ullage.sandbox.worker_pool import WorkerPool

    warm = WorkerPool(["ullage.estimation.scripts.child"])
    yield warm
    warm.close()


@pytest.fixture
def warm(_warm_processes):
    """Processes of scripts are forked from one that has imported PyTorch, as the daemon has it done."""
    from ullage.estimation.scripts.parent import many_runs

    with many_runs(warm=_warm_processes):
        yield


@pytest.fixture(scope="session")
def reference():
    """`reference("groundtruth/events")` is the path of a reference file or folder; a test without it is skipped."""
    folder = os.environ.get("ULLAGE_REFERENCE")
    if folder and not Path(folder).is_dir():
        pytest.fail(f"ULLAGE_REFERENCE names {folder}, which is not a folder")

    def find(name: str) -> Path:
        path = (Path(folder) if folder else SHIPPED) / name
        if path.exists():
            return path
        if folder:
            pytest.skip(f"the folder that ULLAGE_REFERENCE names has no {name}")
        pytest.skip(f"needs {name}: set ULLAGE_REFERENCE to a folder that has it")

    return find


@pytest.fixture(scope="module")
def browser():
    """A real browser; skipped with the reason where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


def pytest_addoption(parser):
    parser.addoption("--soak", type=float, default=1200.0, metavar="SECONDS", help="how long the soak test takes")
