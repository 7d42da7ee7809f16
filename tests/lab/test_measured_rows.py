"""Measured files of every kind are read as runs with the same keys."""

import json
from pathlib import Path

import pytest
from tests.paths import ROOT

from ullage.errors import InvalidValue
from ullage.measuring import accuracy
from ullage_lab.judge.truth import measured_rows

DATASET = ROOT / "benchmarks" / "data" / "generated_h200.parquet"


def test_headers_of_measured_files_are_no_runs(tmp_path: Path) -> None:
    file = tmp_path / "measured.jsonl"
    run = {"id": "a", "model": "mlp:x", "widths": [8, 4], "batch": 2, "peak_reserved": 1 << 21}
    file.write_text(json.dumps({"header": {"gpu": "H200"}}) + "\n" + json.dumps(run) + "\n")
    assert measured_rows(file) == [run]


def test_a_data_set_is_read_as_runs_and_estimated() -> None:
    rows = measured_rows(DATASET)
    assert len({row["id"] for row in rows}) == len(rows)
    assert any(row["nvml_end"] is None for row in rows) and any(row["nvml_end"] for row in rows)
    perceptrons = [row for row in rows if row["model"].endswith(":mlp")]
    found = [accuracy.compare(row) for row in perceptrons[:: len(perceptrons) // 4]]
    assert {one.family for one in found} == {"ullage.learn.families:mlp"}  # the name at the time of measuring
    assert all(one.failed is None for one in found)
    assert sum(one.error("reserved") == 0 for one in found) >= len(found) / 2  # most generated perceptrons are exact


def test_a_file_that_is_no_data_set_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    file.write_text("no")
    with pytest.raises(InvalidValue, match="lab data clean"):
        measured_rows(file)
