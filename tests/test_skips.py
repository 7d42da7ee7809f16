"""Skips that are expected, and what the others do to a run."""

import ast
from pathlib import Path

import pytest
from tests.skips import categories

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent
TESTS = """
    import pytest

    def test_uv_says_which_python_it_would_run():
        pytest.skip("needs uv: pip install uv")

    @pytest.mark.parametrize("number", [1, 2])
    def test_in_a_browser(number):
        pytest.skip("no Chromium on this machine: apt-get install chromium")

    @pytest.mark.xfail(reason="a known defect")
    def test_that_is_expected_to_fail():
        raise ValueError
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run these tests, each a module of its own, with these words; the exit code and what it prints."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other plugins take longer than the tests

    def run(*modules, words=("--strict-skips",)):
        pytester.makepyfile(**{f"test_{number}": text for number, text in enumerate(modules)})
        done = pytester.runpytest_inprocess("-p", "tests.skips", *words)
        return done.ret, done.outlines

    return run


def test_every_line_names_a_test_that_can_be_skipped():
    names = {name for category in categories().values() for name in category.skips} - {"*"}
    trees = [ast.parse(file.read_text()) for file in HERE.rglob("test_*.py")]
    found = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert names and names <= found


def test_the_end_says_what_was_left_out_and_what_brings_it(run):
    code, lines = run(TESTS)
    assert code == 0
    assert (
        "left out: 2 browser tests (apt-get install chromium), "
        "1 tests of other packages (make .venv/ci; apt-get install systemd)"
    ) in lines


def test_a_skip_of_a_category_that_is_not_allowed_fails_the_run(run):
    code, lines = run(TESTS, words=("--strict-skips=packages,hardware",))
    assert code == 1
    assert [line for line in lines if line.startswith("test_0.py::")] == [
        f"test_0.py::test_in_a_browser[{number}]: no Chromium on this machine: apt-get install chromium "
        "(apt-get install chromium)"
        for number in (1, 2)
    ]


@pytest.mark.parametrize("beside", ["def test_it(): pass", "def test_it(): raise ValueError", ""])
@pytest.mark.parametrize(
    "skipped",
    [
        "import pytest\ndef test_new(): pytest.skip('some reason')",
        "import pytest\npytest.importorskip('no_such_module', reason='some reason')",
        "import pytest\n@pytest.fixture\ndef made(): pytest.skip('some reason')\ndef test_new(made): pass",
    ],
)
def test_an_unexpected_skip_fails_the_run(run, skipped, beside):
    code, lines = run(skipped, beside)
    assert code == 1
    assert any(line.endswith(": some reason (not in expected_skips.toml)") for line in lines)


def test_the_reason_counts_as_well_as_the_name(run):
    text = TESTS.replace("needs uv: pip install uv", "some reason")
    assert run(text)[0] == 1


def test_without_the_option_any_skip_is_fine(run):
    code, lines = run("import pytest\ndef test_new(): pytest.skip('some reason')", words=())
    assert code == 0 and not any("some reason" in line for line in lines)


def test_an_unknown_category_is_a_usage_error(run):
    assert run(TESTS, words=("--strict-skips=chrome",))[0] == pytest.ExitCode.USAGE_ERROR
