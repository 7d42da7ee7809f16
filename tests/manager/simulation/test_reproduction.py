"""The dissertation's sixth chapter again: the scripts on small traces, and the authors' own where they are at hand."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ullage.manager.settings import read_settings
from ullage.manager.simulation.engine import simulate
from ullage.manager.simulation.generator import generate_trace
from ullage.manager.simulation.reading import write_trace
from ullage.units import GIB

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks" / "dissertation"


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    sys.path.insert(0, str(BENCHMARKS))
    import ours_against_theirs
    import reproduction

    yield reproduction, ours_against_theirs
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def chapter(scripts, tmp_path_factory):
    """Every run of the chapter on eight drawn jobs."""
    folder = tmp_path_factory.mktemp("traces")
    for name in scripts[0].TRACES.values():
        write_trace(generate_trace(8, 1, gpus=4, load=3.0, mix="heavy", spread=0.0), folder / f"{name}.csv")
    return folder, scripts[0].simulated(folder, seeds=2)


def test_every_run_of_the_chapter_has_its_published_figure(scripts, chapter) -> None:
    made = scripts[0].tables(chapter[1])
    last = [line.split("|")[-2].strip() for line in made["unknown"].splitlines()[3:]]
    assert last == ["8", "5", "4", "2", "2", "2", "1", "2"]
    assert "| MAGM + GPUMemNet (80%) |" in made["heavy"] and "| 28.5 | -14.1% |" in made["heavy"]
    assert made["oracles"].count("streams") == 4 and "-30.1%" in made["oracles"]
    page = scripts[0].PAGE.read_text()
    assert all(f"<!-- reproduction: {name} -->" in page for name in made)


def test_pictures_show_ours_and_theirs(scripts, chapter) -> None:
    drawn = scripts[0].pictures(*chapter)
    page = scripts[0].PAGE.read_text()
    assert all(f"docs/images/{name}" in page and (scripts[0].IMAGES / name).is_file() for name in drawn)
    assert drawn["reproduction_ooms.svg"].count('class="mps"') == 1 + 8 + 6 + 7
    assert drawn["reproduction_time.svg"].count("<polyline") == 6


def test_the_order_agrees_if_differences_exceed_noise(scripts) -> None:
    script = scripts[0]

    class Told(script.Done):
        def values(self, measure):
            return self.figures

    def done(name, theirs, *ours):
        return Told(script.Run("60", name, None, {"ooms": theirs}), ours)

    found = script.agreement([done("a", 9, 8.0, 10.0), done("b", 5, 4.0, 7.0), done("c", 4, 5.0, 7.0)], "ooms")
    assert (found.same, found.decided, found.otherwise) == (2, 2, []) and 0 < found.tau < 1
    turned = script.agreement([done("a", 9, 1.0, 1.0), done("b", 5, 4.0, 4.0)], "ooms")
    assert (turned.tau, turned.same, turned.otherwise) == (-1.0, 0, ["a and b"])


def test_ours_and_theirs_meet_equal_jobs_and_are_paired(scripts) -> None:
    script = scripts[1]
    wanted = script.drawn_cases(4, small=10)
    assert {case.source.mix for case in wanted} == {"heavy", "mixed"}
    assert [dict(case.source.drawn)["load"] for case in wanted[:: len(script.SCENARIOS)]] == [1.0, 1.0, 3.5, 3.5]
    found = script.simulated(wanted)
    assert {len(figures) for figures in found.values()} == {4}
    assert all(each.done == each.jobs for figures in found.values() for each in figures)
    rows = script.comparison(found, script.THEIRS.name)
    assert [row[0] for row in rows] == ["exclusive", *(each.name for each in script.SCENARIOS[2:])]


def test_on_the_authors_trace_sharing_wins_and_ours_has_no_oom(scripts) -> None:
    trace = scripts[0].source_of(scripts[0].FILES, "60").read(0)
    ours = scripts[1].OURS

    def totals(scenario) -> float:
        return statistics.fmean(simulate(trace, scenario.but(seed=seed)).figures.total_s for seed in range(2))

    rad_rm = scripts[0].rad_rm
    blind, known = rad_rm("round_robin"), rad_rm("magm", "gpumemnet", smact=0.8)
    assert totals(rad_rm("exclusive", "oracle")) > 1.2 * totals(blind) > 1.2 * totals(known)
    assert simulate(trace, ours).figures.ooms == 0 < simulate(trace, blind).figures.ooms


@pytest.fixture
def seeds(scripts):
    import seeds

    return seeds


def test_the_settings_of_a_row_are_the_rules_of_its_run(seeds, tmp_path: Path) -> None:
    run = next(run for run in seeds.CHAPTER["unknown"]() if run.name == "LUG (80%, 5 GB)")
    (tmp_path / "site.toml").write_text(seeds.settings(run, 60.0))
    settings = read_settings(tmp_path / "site.toml")
    assert (settings.placing.smact_limit, settings.placing.free_floor, settings.placing.margin) == (0.8, 5 * GIB, 0)
    assert settings.monitoring.window == 1.5 and settings.recovering.exclusive_after == 1


def test_a_row_is_executed_by_a_daemon_of_its_own(seeds, tmp_path: Path, monkeypatch) -> None:
    write_trace(generate_trace(3, 1, gpus=4, load=3.0, mix="heavy"), tmp_path / "philly_heavy-60-tasks.csv")
    monkeypatch.setattr(seeds, "FILES", tmp_path)
    run = next(run for run in seeds.CHAPTER["heavy"]() if run.name == "MAGM + GPUMemNet (80%)")
    ran = seeds.all_executed([run, run], 2000.0)
    assert ran[seeds.key(run)].done == 3
    done = seeds.Done(run, [ran[seeds.key(run)]])
    crashes, energy = seeds.three_columns([done], ran, "ooms"), seeds.three_columns([done], ran, "energy")
    assert "| MAGM + GPUMemNet (80%) | 0 | 0.0 (0.0 to 0.0) | 1 |" in crashes and "| 28.5 |" in energy
