"""The page on jobs that share a GPU says what the shipped measurements say."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collocation", ROOT / "benchmarks/dissertation/collocation.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["collocation"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_and_pictures_are_those_of_the_shipped_data(script: ModuleType) -> None:
    rows = script.lines()
    page = script.PAGE.read_text()
    assert script.filled(page, rows) == page
    pictures = script.pictures(rows)
    assert pictures
    for name, picture in pictures.items():
        assert (script.IMAGES / name).read_text() == picture
        assert f"../../docs/images/{name}" in page


def test_work_done_counts_each_job_by_its_speed_alone(script: ModuleType) -> None:
    alone = script.Alone()
    alone.rows = [{"step_s": [0.1], "smact": 0.3}, {"step_s": [0.2], "smact": 0.3}, {"step_s": [0.1], "smact": 0.3}]
    both = script.Shared({"how": "mps", "jobs": ["a", "a"], "step_s": [0.1, 0.2]}, (alone, alone))
    assert both.slowdowns == [1.0, 2.0] and both.throughput == 1.5
    assert both.smact_alone == pytest.approx(0.6)


def test_pictures_can_be_read_on_light_and_on_dark_pages(script: ModuleType) -> None:
    for picture in script.pictures(script.lines()).values():
        assert "prefers-color-scheme: dark" in picture and re.search(r'<rect class="back" width="968"', picture)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/dissertation"))
    return script


@pytest.mark.parametrize("name", ["sweep", "light", "heavy"])
def test_tables_of_chapter_3_are_those_of_the_data(name: str, programs: ModuleType) -> None:
    import monitoring_costs

    rows = [json.loads(line) for line in monitoring_costs.DATA.open()]
    table = monitoring_costs.tables_of(rows)[name]
    page = monitoring_costs.PAGE.read_text()
    assert programs.written(page, f"collocation: {name}", table) == page
    assert table.count("\n") > 5


def test_energy_of_chapter_4_is_that_of_the_data(programs: ModuleType) -> None:
    import collocated_epochs

    table = collocated_epochs.energy_table(collocated_epochs.measured(collocated_epochs.DATA))
    page = collocated_epochs.PAGE.read_text()
    assert programs.written(page, "collocation: epochs energy", table) == page
    assert table.count("\n") == 1 + 4 * len(collocated_epochs.JOBS)
