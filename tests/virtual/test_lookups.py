"""Packages with kernels that the code looked for and did not find are named, where that changes what runs."""

import importlib.util
import sys

import pytest
import torch

import ullage
from ullage.virtual import virtual_gpu
from ullage.virtual.releases import release_of


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules, of a script or of an installed library, and imports them inside a virtual GPU."""

    def write(name, text, installed=False):
        folder = tmp_path / "site-packages" if installed else tmp_path / "mine"
        file = folder / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in list(file.parents)[: name.count(".")]:
            (package / "__init__.py").touch()
        file.write_text(text)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return lambda: importlib.import_module(name)

    yield write
    for name in [name for name in sys.modules if name.startswith(("looks_", "trl_"))]:
        del sys.modules[name]


TAKES_KERNELS = """
import torch
try:
    import flash_attn
except ImportError:
    flash_attn = None

def attend(x):
    return x @ x
"""
FINDS_KERNELS = "import importlib.util\nHAS = importlib.util.find_spec('flash_attn') is not None\n"
ASKS_METADATA = """
import importlib.metadata
try:
    importlib.metadata.version("flash-attn")
except importlib.metadata.PackageNotFoundError:
    pass
"""


def about_lookups(gpu):
    return [text for kind, text in gpu.noted if kind == "lookups"]


@pytest.mark.parametrize("text", [TAKES_KERNELS, FINDS_KERNELS, ASKS_METADATA])
def test_a_script_that_looks_for_kernels_is_noted(modules, text):
    load = modules("looks_for_kernels", text)
    with virtual_gpu("H200") as gpu:
        load()
        torch.ones(8, device="cuda")
    (note,) = about_lookups(gpu)
    assert note.endswith(": flash_attn (looks_for_kernels.py)")
    assert [entry["what"] for entry in gpu.left_out] == ["kernels of packages that are not installed here"]


def test_a_library_counts_when_its_code_takes_memory(modules):
    load = modules("looks_library.attention", TAKES_KERNELS, installed=True)
    with virtual_gpu("H200") as gpu:
        module = load()
        x = torch.ones(8, 8, device="cuda")
        assert not about_lookups(gpu)
        module.attend(x)
    assert [note.rpartition(": ")[2] for note in about_lookups(gpu)] == ["flash_attn (looks_library)"]


def test_libraries_that_load_on_request_do_not_count(modules):
    load = modules("timm.looks_for_kernels", TAKES_KERNELS, installed=True)
    with virtual_gpu("H200") as gpu:
        for name in [name for name in sys.modules if name == "timm" or name.startswith("timm.")]:
            del sys.modules[name]
        load().attend(torch.ones(8, 8, device="cuda"))
    for name in [name for name in sys.modules if name == "timm" or name.startswith("timm.")]:
        del sys.modules[name]
    assert not about_lookups(gpu)


def test_installable_packages_are_named(modules, monkeypatch):
    load = modules("looks_for_liger", "try:\n    import liger_kernel, fla\nexcept ImportError:\n    pass\n")
    with virtual_gpu("H200") as gpu:
        load()
    assert "liger_kernel (looks_for_liger.py; pip install liger-kernel)" in about_lookups(gpu)[0]


def test_without_triton_one_that_belongs_to_pytorch_is_named(modules, monkeypatch):
    load = modules("looks_for_triton", "try:\n    import triton\nexcept ImportError:\n    pass\n")
    for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.machinery.PathFinder.find_spec
    monkeypatch.setattr(
        importlib.machinery.PathFinder,
        "find_spec",
        lambda name, path=None, target=None: None if name == "triton" else find(name, path, target),
    )
    with virtual_gpu("H200") as gpu:
        load()
    assert f"pip install triton=={release_of(torch.__version__).triton}.*" in about_lookups(gpu)[0]


def test_other_packages_and_unused_libraries_are_not_reported(modules):
    load = modules("looks_for_others", "try:\n    import no_such_package_at_all\nexcept ImportError:\n    pass\n")
    other = modules("looks_library.other", TAKES_KERNELS, installed=True)
    with virtual_gpu("H200") as gpu:
        load(), other()
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    assert not about_lookups(gpu)
    assert not [finder for finder in sys.meta_path if type(finder).__name__ == "Lookups"]


def test_the_report_is_less_sure():
    def run():
        assert importlib.util.find_spec("apex") is None
        return torch.ones(2**20, device="cuda")

    e = ullage.estimate(run, gpu="H200")
    assert e.upper_covers is False and "not installed here" in e.certainty
