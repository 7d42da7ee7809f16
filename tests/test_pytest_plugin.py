"""The fixture `virtual_gpu`, in a pytest of its own."""

import pytest

pytest_plugins = ["pytester"]

TESTS = """
    import pytest, torch

    def train(width):
        model = torch.nn.Linear(width, width).cuda()
        model(torch.randn(8, width, device="cuda")).sum().backward()

    def test_fits(virtual_gpu):
        with virtual_gpu("RTX-4090") as gpu:
            train(1024)
        assert gpu.process_memory < 2 * 2**30 and torch.cuda.is_available() is False

    def test_plain(virtual_gpu):
        with virtual_gpu() as gpu:
            train(64)
        assert gpu.spec.name == "T4"

    def test_grew(virtual_gpu):
        with virtual_gpu("T4") as gpu:
            train(2048)
        assert gpu.peak_allocated < 2**20

    def test_too_large(virtual_gpu):
        with virtual_gpu("RTX-4060"):
            train(200_000)

    def test_no_such_gpu(virtual_gpu):
        virtual_gpu("RTX-4O90")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other plugins take longer than the tests
    pytester.makepyfile(TESTS)

    def run(*words):
        return pytester.runpytest_subprocess("-p", "ullage.pytest_plugin", *words)

    return run


def test_a_team_can_test_that_its_model_fits(run):
    answer = run("--virtual-gpu", "T4")
    answer.assert_outcomes(passed=2, failed=3)
    answer.stdout.fnmatch_lines(
        [
            "*T4: * MiB of 14.6 GiB, 4* MiB allocated; peak in Linear*",
            ">*train(200_000)*",
            ">*model = torch.nn.Linear(width, width).cuda()*",
            "E *OutOfMemoryError: CUDA out of memory*",
            "*.py:4: OutOfMemoryError",
            ">*virtual_gpu(*RTX-4O90*)*",
            "*no GPU named 'RTX-4O90'; did you mean 'RTX-4090'*",
        ]
    )


@pytest.mark.slow
def test_the_default_can_be_set_in_the_ini_file(run, pytester):
    pytester.makeini("[pytest]\nvirtual_gpu = T4\n")
    run("-k", "test_plain").assert_outcomes(passed=1, deselected=4)


def test_the_entry_point_is_declared():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"ullage": "ullage.pytest_plugin"}
