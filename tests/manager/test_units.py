"""The unit files for systemd: they are understood, start what there is, and leave running jobs alone."""

import configparser
import os
import re
import shutil
import subprocess
import sys

import pytest
from tests.paths import ROOT

UNITS = sorted((ROOT / "examples/systemd").glob("*.service"))


def read(unit):
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(unit)
    return parser


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_what_there_is_and_leaves_jobs_alone(unit):
    service = read(unit)["Service"]
    program, verb, *options = service["ExecStart"].split()
    assert program.endswith("/ullage") and service["KillMode"] == "process"
    shown = subprocess.run(
        [sys.executable, "-m", "ullage", verb, "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "200"},
    )
    for option in (word for word in options if word.startswith("--")):
        assert re.search(rf"{option}\b", shown.stdout)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong(unit, tmp_path):
    text = unit.read_text()
    copy = tmp_path / unit.name
    copy.write_text(text.replace(read(unit)["Service"]["ExecStart"].split()[0], "/usr/bin/env"))
    done = subprocess.run(
        ["systemd-analyze", "verify", *(["--user"] if "user" in unit.name else []), str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_there_are_units():
    assert [unit.name for unit in UNITS] == ["ullage-user.service", "ullage.service"]
