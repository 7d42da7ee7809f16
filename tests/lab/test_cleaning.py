"""Measured files to a data set: joined, checked, with an account of every line; the authors' tables as well."""

import csv
import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import polars
import pytest
from tests.paths import ROOT
from typer.testing import CliRunner

from ullage.cli.main import app
from ullage.errors import InvalidValue
from ullage.jobs import Model
from ullage_lab.clean import rows as cleaning
from ullage_lab.clean.measured_files import REASONS, CleaningReport
from ullage_lab.clean.rows import clean
from ullage_lab.clean.schema import COLUMNS, frame, read_dataset, write_dataset
from ullage_lab.estimators.fast.features import features

HEADER = {
    "gpu": "NVIDIA H200",
    "memory": 150109880320,
    "driver": "580.159.04",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "cudnn": 91900,
    "context": 543162368,
}
# As measured on an H200.
MLP: dict[str, Any] = {
    "id": "mlp-1-00012",
    "family": "mlp",
    "arch": "gradual",
    "model": "ullage_lab.networks.generated:mlp",
    "batch": 596,
    "input": [2307],
    "classes": 488,
    "opt": "adam",
    "precision": "fp32",
    "settings": {"widths": [2307, 1397], "act": "silu", "batch_norm": False, "dropout": 0.34},
    "parameters": 3906500,
    "pass": "memory",
    "nvml_ctx": 543162368,
    "nvml_end": 962592768,
    "end_reserved": 184549376,
    "peak_alloc": 153605120,
    "peak_reserved": 184549376,
    "retries": 0,
    "optimizer_steps": 3,
}
BUSY: dict[str, Any] = {
    "pass": "utilization",
    "step_s": 0.002156,
    "gract": 0.2585,
    "smact": 0.1626,
    "smocc": 0.0199,
    "drama": 0.0171,
    "power_w": 189.8,
    "pcie_rx": 2754704331.0,
    "pcie_tx": 166231650.0,
    "cpu_percent": 97.7,
    "ram_bytes": 868143104,
}


def measured(file: Path, rows: Iterable[dict[str, Any]], header: dict[str, Any] | None = HEADER) -> Path:
    lines = ([{"header": header}] if header else []) + list(rows)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def mlp(number: int = 12, **more: Any) -> dict[str, Any]:
    """A run of its own for every number."""
    row = MLP | {"id": f"mlp-1-{number:05d}", "batch": 584 + number} | more
    return {key: value for key, value in row.items() if value is not None}


def cleaned(*files: Path) -> tuple[list[dict[str, Any]], CleaningReport]:
    rows, report = clean(files)
    kept = frame(rows).to_dicts()
    assert report.read == report.kept + report.joined + len(report.dropped)
    assert report.kept == len(kept)
    return kept, report


def test_memory_and_utilisation_of_a_run_become_one_row(tmp_path: Path) -> None:
    memory = measured(tmp_path / "memory.jsonl", [mlp(12), mlp(13)])
    busy = measured(tmp_path / "busy.jsonl.gz", [mlp(13, **BUSY, optimizer_steps=None)])
    (first, second), report = cleaned(busy, memory)
    if first["id"] == "mlp-1-00012":
        first, second = second, first
    assert report.joined == 1
    assert (first["id"], first["source"]) == ("mlp-1-00013", "memory.jsonl")
    assert first["process_memory"] == 962592768
    assert first["context"] == 962592768 - 184549376
    assert (first["step_seconds"], first["gract"], first["power_w"]) == (0.002156, 0.2585, 189.8)
    assert (first["ram_bytes"], first["pcie_rx"]) == (868143104, 2754704331.0)
    assert (first["gpu"], first["torch"], first["cudnn"]) == ("H200", "2.11.0+cu130", "91900")
    assert second["gract"] is None and second["step_seconds"] is None


def test_readings_of_a_run_tell_its_family_and_its_host(tmp_path: Path) -> None:
    more = {
        "tensor": 0.2,
        "step_q1": 0.0021,
        "step_median": 0.00215,
        "step_q3": 0.0022,
        "steps": 230,
        "host_s": 0.0019,
        "energy_step_j": 0.41,
        "clock_mhz": 1980.0,
    }
    (row,), _ = cleaned(measured(tmp_path / "busy.jsonl", [mlp(13, **BUSY, **more)]))
    assert (row["model_family"], row["kind"], row["split"]) == ("generated mlp gradual", "mlp", "train")
    assert (row["host_seconds"], row["energy_step"], row["clock_mhz"], row["steps"]) == (0.0019, 0.41, 1980.0, 230)
    assert (row["tensor"], row["step_q1"], row["step_median"], row["step_q3"]) == (0.2, 0.0021, 0.00215, 0.0022)


def test_run_that_was_read_twice_tells_how_far_readings_differ(tmp_path: Path) -> None:
    again = {**BUSY, "step_s": 0.002156 * 1.02, "smact": 0.1526}
    rows = [mlp(13, **BUSY), mlp(13, **again) | {"id": "again"}, mlp(14, **BUSY), mlp(14, **BUSY) | {"id": "third"}]
    _, report = cleaned(measured(tmp_path / "busy.jsonl", rows))
    told = report.to_dict()
    assert told["repeated"] == 2 and told["dropped"] == {"duplicate": 2}
    assert told["noise"]["step_s"] == {"median": 0.0, "p90": 0.0} and told["noise"]["smact"]["median"] == 0.0
    one = CleaningReport(repeated=report.repeated[:1]).noise()
    assert one["step_s"]["p90"] == pytest.approx(0.02) and one["smact"]["p90"] == pytest.approx(1.0)


def test_show_tells_how_readings_spread(tmp_path: Path) -> None:
    rows = [
        {
            "id": str(n),
            "family": "timm",
            "kind": "cnn",
            "model_family": ("vgg", "resnet")[n % 2],
            "smact": n / 100,
            "split": ("train", "test")[n % 2],
            "step_seconds": n / 1000,
        }
        for n in range(1, 12)
    ]
    write_dataset(frame(rows), tmp_path / "read.parquet")
    told = json.loads(CliRunner().invoke(app, ["lab", "data", "show", str(tmp_path / "read.parquet"), "--json"]).stdout)
    cnn = told["readings"]["cnn"]
    assert (cnn["rows"], cnn["families"], cnn["test_rows"], cnn["test_families"]) == (11, 2, 6, ["resnet"])
    assert cnn["smact"] == [0.02, 0.06, 0.1] and cnn["power_w"] is None
    shown = CliRunner().invoke(app, ["lab", "data", "show", str(tmp_path / "read.parquet")]).stdout
    assert "2.0 6.0 10.0" in shown and "unknown" in shown


def test_data_sets_of_earlier_releases_are_read(tmp_path: Path) -> None:
    table = frame([{"id": "a", "family": "mlp", "gract": 0.5}])
    write_dataset(table.drop("model_family", "host_seconds", "split"), tmp_path / "old.parquet")
    read = read_dataset(tmp_path / "old.parquet")
    assert read.schema == table.schema and read["host_seconds"].to_list() == [None]
    write_dataset(table.drop("gract"), tmp_path / "none.parquet")
    with pytest.raises(InvalidValue, match="lacks the column gract"):
        read_dataset(tmp_path / "none.parquet")


def test_features_are_those_of_the_configuration(tmp_path: Path) -> None:
    (row,), _ = cleaned(measured(tmp_path / "m.jsonl", [mlp()]))
    found = features(Model.from_row(json.loads(row["configuration"])))
    assert found == features(Model.from_row(MLP))
    assert [tuple(layer.values()) for layer in row["layers"]] == list(found.layers)
    assert row["activations_batch"] == 596 * row["activations"] == 596 * found.activations
    assert (row["parameters"], row["count_linear"], row["depth"]) == (3906500, 2, 2)
    assert (row["family"], row["arch"], row["optimizer"]) == ("mlp", "gradual", "adam")


def test_the_process_peak_counts_after_memory_was_returned(tmp_path: Path) -> None:
    (row,), _ = cleaned(measured(tmp_path / "m.jsonl", [mlp(nvml_end=900 << 20, end_reserved=100 << 20)]))
    assert row["process_memory"] == (800 << 20) + MLP["peak_reserved"]


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("out of memory", {"oom": "CUDA out of memory. Tried to allocate 2.00 GiB", "tried": 151 << 30}),
        ("failed", {"failed": "ended by signal 9"}),
        ("too few optimizer steps", {"precision": "amp_fp16", "optimizer_steps": 0}),
        ("too few optimizer steps", {"precision": "amp_fp16", "optimizer_steps": 1}),
        ("memory was short", {"retries": 1}),
        ("impossible values", {"peak_reserved": 100, "end_reserved": 50}),
        ("impossible values", {"nvml_end": 1000}),
        ("impossible values", {"peak_alloc": None}),
        ("impossible values", {"nvml_end": 200 << 30}),
        ("impossible values", {"peak_alloc": 3906500 * 7}),
        ("no training run", {"model": None}),
        ("no training run", {"opt": "adamant"}),
        ("failed", {"classes": None, "input": [5]}),
    ],
)
def test_dropped_rows_have_a_reason(tmp_path: Path, reason: str, changes: dict[str, Any]) -> None:
    rows, report = cleaned(measured(tmp_path / "m.jsonl", [mlp(1), mlp(2, **changes)]))
    assert [row["id"] for row in rows] == ["mlp-1-00001"]
    assert report.counts == {reason: 1}
    (dropped,) = report.dropped
    assert (dropped.id, dropped.source) == ("mlp-1-00002", "m.jsonl") and dropped.detail


def test_one_step_is_enough_for_an_optimizer_without_states(tmp_path: Path) -> None:
    rows, _ = cleaned(measured(tmp_path / "m.jsonl", [mlp(precision="amp_fp16", optimizer_steps=1, opt="sgd")]))
    assert len(rows) == 1


def test_duplicate_runs_merge_and_failures_hide_no_success(tmp_path: Path) -> None:
    again = mlp(12, peak_reserved=200 << 20, id="other-name")
    rows, report = cleaned(measured(tmp_path / "m.jsonl", [mlp(12, failed="too slow"), mlp(12), again]))
    assert [(row["id"], row["peak_reserved"]) for row in rows] == [("mlp-1-00012", MLP["peak_reserved"])]
    assert report.counts == {"failed": 1, "duplicate": 1}


def test_another_gpu_or_version_is_another_run(tmp_path: Path) -> None:
    one = measured(tmp_path / "a.jsonl", [mlp()])
    two = measured(tmp_path / "b.jsonl", [mlp()], HEADER | {"torch": "2.13.0"})
    three = measured(tmp_path / "c.jsonl", [mlp()], None)
    rows, _ = cleaned(one, two, three)
    assert sorted((row["gpu"] or "", row["torch"] or "") for row in rows) == [
        ("", ""),
        ("H200", "2.11.0+cu130"),
        ("H200", "2.13.0"),
    ]
    assert {row["id"] for row in rows} == {"mlp-1-00012"}


def test_runs_of_two_sets_with_the_same_id_get_ids_of_their_own(tmp_path: Path) -> None:
    rows, report = cleaned(measured(tmp_path / "m.jsonl", [mlp(), mlp(batch=7)]))
    assert [row["id"] for row in rows] == ["mlp-1-00012", "mlp-1-00012+2"]
    assert report.renamed == 1


def test_utilisation_gives_memory_and_impossible_shares_none(tmp_path: Path) -> None:
    busy = BUSY | {"gract": 1.7, "smact": 1.003, "smocc": -1.0, "drama": None, "power_w": 0.0}
    (row,), report = cleaned(measured(tmp_path / "b.jsonl", [mlp(**busy, optimizer_steps=None)]))
    assert row["peak_reserved"] == MLP["peak_reserved"] and row["step_seconds"] == BUSY["step_s"]
    assert (row["gract"], row["smact"], row["smocc"], row["drama"], row["power_w"]) == (None, 1.0, None, None, None)
    assert dict(report.blanked) == {"gract": 1, "smocc": 1, "power_w": 1}


def test_a_real_model_that_was_measured_is_a_row_of_its_source(tmp_path: Path) -> None:
    line = {
        "id": "x",
        "model": "mlp:x",
        "widths": [8, 4],
        "batch": 2,
        "opt": "sgd",
        "peak_alloc": 9000,
        "peak_reserved": 2 << 20,
    }
    (row,), _ = cleaned(measured(tmp_path / "m.jsonl", [line], None))
    assert (row["family"], row["arch"], row["process_memory"], row["context"]) == ("mlp", None, None, None)


def authors_csv(file: Path, **changes: str) -> Path:
    line = {
        "Filename": "input:12_output:3_depth:1_arch:pyramid_batch:9_act:leaky_relu_dropout:0.3_dropout:True_batchnorm:"
        "True.out",
        "Depth": "2",
        "Activations-Params": "[('linear', 6, 78), ('batch_normalization', 6, 12), ('LeakyReLU', 6, 0), "
        "('dropout', 6, 0), ('linear', 3, 21), ('Softmax', 3, 0)]",
        "Activation Function": "LeakyReLU",
        "Total Activations": "30",
        "Total Parameters": "111",
        "Batch Size": "9",
        "Max GPU Memory (MiB)": "1545",
        "Avg GRACT": "0.25",
        "Avg SMACT": "0.2",
        "Avg SMOCC": "-1.0",
    }
    others = [line | changes] if changes else []
    with file.open("w", newline="") as sink:
        writer = csv.DictWriter(sink, [*line, *(name for name in changes if name not in line)])
        writer.writeheader()
        writer.writerows([line, *others])
    return file


def test_the_authors_table_gives_the_same_columns(tmp_path: Path) -> None:
    rows, report = cleaned(authors_csv(tmp_path / "a100.csv", Filename="b.out", Status="OOM_CRASH"))
    (row,) = rows
    assert (row["family"], row["arch"], row["gpu"], row["optimizer"]) == ("mlp", "pyramid", "A100-40GB", "adam")
    assert row["process_memory"] == 1545 << 20 and row["peak_allocated"] is None
    assert (row["input_elements"], row["activations"], row["activations_batch"]) == (12, 30, 270)
    assert (row["count_linear"], row["count_batch_norm"], row["depth"]) == (2, 1, 2)
    assert (row["activation_function"], row["layers"][1]["type"]) == ("leakyrelu", "batch_norm")
    assert (row["gract"], row["smocc"]) == (0.25, None)
    assert report.counts == {"out of memory": 1}


def test_a_broken_line_of_a_table_is_named_by_its_number(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"t\.csv, line 3"):
        clean([authors_csv(tmp_path / "t.csv", **{"Batch Size": "many"})])
    (tmp_path / "no.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InvalidValue, match="lacks the column 'Filename'"):
        clean([tmp_path / "no.csv"])


def test_the_authors_published_tables_are_read_whole(reference: Callable[[str], Path]) -> None:
    names = ("gpumemnet_mlp_a100.csv", "gpumemnet_cnn_early_a100.csv")
    rows, report = cleaned(*(reference(f"reference/{name}") for name in names))
    assert (len(rows), report.counts) == (3000 + 1592, {"out of memory": 384})
    for row in rows:
        assert row["activations"] == sum(layer["activations"] for layer in row["layers"])
        assert row["input_elements"] and row["arch"]


def test_the_command_writes_the_file_and_tells_what_was_dropped(tmp_path: Path) -> None:
    file = measured(tmp_path / "m.jsonl", [mlp(1), mlp(2, failed="killed"), mlp(3)])
    line = ["lab", "data", "clean", str(file), "--out", str(tmp_path / "d" / "x.parquet")]
    told = CliRunner().invoke(app, [*line, "--report", str(tmp_path / "report.json")])
    assert told.exit_code == 0, told.output
    assert "dropped: failed" in told.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["dropped"] == {"failed": 1}
    assert report["dropped_lines"] == [
        {"id": "mlp-1-00002", "reason": "failed", "detail": "killed", "source": "m.jsonl"}
    ]
    table = read_dataset(tmp_path / "d" / "x.parquet")
    assert table.columns == [column.name for column in COLUMNS]
    assert table["layers"].dtype == polars.List(
        polars.Struct({"type": polars.String, "activations": polars.Int64, "parameters": polars.Int64})
    )
    again = CliRunner().invoke(app, [*line, "--json"])
    assert json.loads(again.stdout)["kept"] == 2


def test_empty_results_and_invalid_files_are_reported(tmp_path: Path) -> None:
    file = measured(tmp_path / "m.jsonl", [mlp(2, failed="killed")])
    told = CliRunner().invoke(app, ["lab", "data", "clean", str(file), "--out", str(tmp_path / "x.parquet")])
    assert told.exit_code == 1 and "nothing is left" in str(told.exception or told.output)
    (tmp_path / "y.parquet").write_text("no table")
    with pytest.raises(InvalidValue, match="ullage lab data clean"):
        read_dataset(tmp_path / "y.parquet")
    polars.DataFrame({"id": ["a"]}).write_parquet(tmp_path / "z.parquet")
    with pytest.raises(InvalidValue, match="lacks the column family"):
        read_dataset(tmp_path / "z.parquet")


def test_many_rows_come_through_in_pieces(tmp_path: Path) -> None:
    table = frame({"id": str(number), "layers": [("linear", number, 0)]} for number in range(1203))
    write_dataset(table.with_columns(), tmp_path / "x.parquet")
    read = read_dataset(tmp_path / "x.parquet")
    assert read["id"].to_list() == [str(number) for number in range(1203)]
    assert read["layers"][1202].to_list() == [{"type": "linear", "activations": 1202, "parameters": 0}]


def test_show_counts_classes_and_shares(tmp_path: Path) -> None:
    gib = 1 << 30
    rows = [
        {"id": "a", "family": "cnn", "optimizer": "adam", "process_memory": 9 * gib + 5, "gract": 0.5, "gpu": "H200"},
        {"id": "b", "family": "cnn", "optimizer": "adam", "process_memory": 15 * gib, "gpu": "H200"},
        {"id": "c", "family": "cnn", "optimizer": "sgd", "process_memory": gib - 1, "gpu": "H200"},
        {"id": "d", "family": "mlp", "optimizer": None, "process_memory": None, "gpu": None},
    ]
    file = tmp_path / "x.parquet"
    write_dataset(frame(rows), file)
    found = json.loads(CliRunner().invoke(app, ["lab", "data", "show", str(file), "--json"]).stdout)
    assert (found["rows"], found["gpu"]) == (4, {"H200": 3, "unknown": 1})
    cnn = found["families"]["cnn"]
    assert (cnn["rows"], cnn["with_utilization"], cnn["optimizer"]) == (3, 1, {"adam": 2, "sgd": 1})
    assert cnn["classes_1gib"] == {"0": 1, "9": 1, "15": 1}
    assert cnn["classes_8gib"] == {"0": 1, "1": 2}
    assert cnn["memory"]["largest"] == 15 * gib
    assert found["families"]["mlp"]["memory"] is None
    told = CliRunner().invoke(app, ["lab", "data", "show", str(file)])
    assert told.exit_code == 0, told.output
    assert "8 to 16: 2 (66.7%)" in told.output and "sgd 33.3%" in told.output
    assert CliRunner().invoke(app, ["lab", "data", "show", str(file), "--family", "cmm"]).exit_code == 1


@pytest.mark.slow
def test_processes_give_the_same_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [json.dumps({"model": "mlp:x", "widths": [8, width], "batch": 2}) for width in range(1, 5)]
    texts.append(json.dumps({"model": "mlp:x", "batch": 2}))
    alone = list(cleaning.feature_rows(texts))
    monkeypatch.setattr(cleaning, "FEW", 2)
    assert list(cleaning.feature_rows(texts, 2)) == alone
    assert isinstance(alone[-1], str) and "widths" in alone[-1]
    assert [row["parameters"] for row in alone[:-1] if isinstance(row, dict)] == [9, 18, 27, 36]


def test_the_columns_are_documented() -> None:
    text = (ROOT / "lab/docs/data.md").read_text()
    assert [column.name for column in COLUMNS if f"`{column.name}`" not in text] == []
    assert [reason for reason in REASONS if f"| {reason} |" not in text] == []
