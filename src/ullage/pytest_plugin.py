"""A pytest fixture to test, on a machine without a GPU, that a model still trains on a given GPU.

    def test_it_trains_on_a_4090(virtual_gpu):
        with virtual_gpu("RTX-4090") as gpu:
            train(batch_size=32)
        assert gpu.process_memory < 20 * 2**30

A job that is too large raises `torch.cuda.OutOfMemoryError` inside the `with`, so the test fails without an assertion.
`virtual_gpu()` without a name uses `--virtual-gpu NAME` or the setting `virtual_gpu` of the ini file. The report of a
test that failed shows the memory of each of its virtual GPUs. An error of a virtual GPU is shown at the line of your
code that caused it, not where it was raised.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ullage.allocator import AllocatorConfig
    from ullage.hardware import GPU
    from ullage.virtual import VirtualGPU

_USED = pytest.StashKey[list[Any]]()


class GPUMaker:
    """The value of the fixture `virtual_gpu`: call it with a name to get a virtual GPU for a `with` statement."""

    def __init__(self, default: str, used: list[Any]) -> None:
        self._default, self._used = default, used

    def __call__(self, name: "str | GPU | None" = None, config: "AllocatorConfig | None" = None) -> "VirtualGPU":
        from ullage.virtual import virtual_gpu

        made = virtual_gpu(name or self._default, config)
        self._used.append(made)
        return made


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the setting for the default GPU."""
    parser.getgroup("ullage").addoption("--virtual-gpu", help="the default GPU of the fixture virtual_gpu")
    parser.addini("virtual_gpu", "the default GPU of the fixture virtual_gpu", default="H200")


@pytest.fixture
def virtual_gpu(request: pytest.FixtureRequest) -> Iterator[GPUMaker]:
    """Create virtual GPUs: inside `with virtual_gpu("RTX-4090") as gpu:`, "cuda" is that GPU."""
    default = request.config.getoption("--virtual-gpu") or request.config.getini("virtual_gpu")
    yield GPUMaker(str(default), request.node.stash.setdefault(_USED, []))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Add the memory of its virtual GPUs to the report of a test that failed."""
    used = item.stash.get(_USED, None)
    if used is not None and call.excinfo is not None:
        from ullage.estimation.scripts.failures import as_user_sees

        call.excinfo = pytest.ExceptionInfo.from_exception(as_user_sees(call.excinfo.value))
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed and used:
        report.sections.append(("Virtual GPUs", "\n".join(_line(gpu) for gpu in used)))


def _line(gpu: "VirtualGPU") -> str:
    from ullage.units import format_bytes

    place = gpu.peak_place
    where = f"; peak in {place.module} ({place.operator}, {place.part})" if place and place.module else ""
    taken, has = format_bytes(gpu.process_memory), format_bytes(gpu.spec.usable)
    return f"{gpu.spec.name}: {taken} of {has}, {format_bytes(gpu.peak_allocated)} allocated{where}"
