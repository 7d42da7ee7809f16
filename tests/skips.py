"""A pytest plugin: what was skipped, and how to get it run. `--strict-skips` fails the run over any other skip.

tests/expected_skips.toml says which skips are expected, in categories. Reports are read in the main process alone.
"""

import tomllib
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

EXPECTED_SKIPS = Path(__file__).parent / "expected_skips.toml"


@dataclass
class Category:
    """What these tests are called, how to get them run, and their names, each with a part of the reason."""

    what: str
    bring: str
    skips: dict[str, str | list[str]]

    def has(self, nodeid: str, reason: str) -> bool:
        """Names are compared without folder and parameters."""
        name = nodeid.rpartition("::")[2].partition("[")[0].rpartition("/")[2]
        parts = (part for pattern, part in self.skips.items() if fnmatchcase(name, pattern))
        return any(each in reason for part in parts for each in ([part] if isinstance(part, str) else part))


def categories() -> dict[str, Category]:
    """The expected skips, by the name of their category."""
    return {name: Category(**table) for name, table in tomllib.loads(EXPECTED_SKIPS.read_text()).items()}


def pytest_addoption(parser):
    parser.addoption(
        "--strict-skips",
        nargs="?",
        const="",
        metavar="CATEGORY,...",
        help="fail over a skip that is not in these categories of expected_skips.toml (without a value: in none)",
    )


def pytest_configure(config):
    config.pluginmanager.register(SkipAccount(config.getoption("--strict-skips")), "skip-account")


class SkipAccount:
    """Collects skips, says which there were, and fails the session over those that are not allowed."""

    def __init__(self, strict: str | None):
        self._categories = categories()
        self._allowed = set(self._categories) if not strict else set(strict.split(","))
        if unknown := self._allowed - set(self._categories):
            known = ", ".join(self._categories)
            raise pytest.UsageError(f"--strict-skips has no {', '.join(sorted(unknown))}; categories are {known}")
        self._is_strict = strict is not None
        self._skips: dict[tuple[str, str], str | None] = {}  # name and reason: the category

    def pytest_runtest_logreport(self, report):
        self._note(report)

    def pytest_collectreport(self, report):
        self._note(report)

    def _note(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            skip = report.nodeid, str(report.longrepr[2]).removeprefix("Skipped: ")
            self._skips[skip] = next((name for name, each in self._categories.items() if each.has(*skip)), None)

    @property
    def _refused(self) -> list[tuple[str, str]]:
        return sorted(skip for skip, category in self._skips.items() if category not in self._allowed)

    def pytest_sessionfinish(self, session):
        fine = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._is_strict and self._refused and fine:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self._is_strict and self._refused:
            terminalreporter.section("skips that are not allowed here", red=True)
            for nodeid, reason in self._refused:
                known = self._categories.get(self._skips[nodeid, reason])
                hint = known.bring if known else f"not in {EXPECTED_SKIPS.name}"
                terminalreporter.line(f"{nodeid}: {reason} ({hint})")
        counts = Counter(self._skips.values())
        left = [f"{counts[key]} {each.what} ({each.bring})" for key, each in self._categories.items() if counts[key]]
        if left:
            terminalreporter.line("left out: " + ", ".join(left))
