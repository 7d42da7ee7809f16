"""Lists of convolutions to measure: what they hold, and that they can be read back."""

import re
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ullage.cli.main import app
from ullage.errors import InvalidValue, UllageError
from ullage.virtual.torch_api.torchvision import make_torchvision_importable
from ullage_lab.draw import convolutions as collect
from ullage_lab.draw.convolutions import arbitrary_configurations
from ullage_lab.draw.layers import TYPES, operations, read_tasks, tensor_bytes


def invoke(*arguments):
    return CliRunner().invoke(app, ["lab", *map(str, arguments)])


def test_arbitrary_layers_alone_can_be_listed_without_any_model(tmp_path):
    out = tmp_path / "odd.json.gz"
    result = invoke(
        "draw",
        "convolutions",
        "--out",
        out,
        "--stop-after",
        0,
        "--configurations",
        0,
        "--random",
        0,
        "--arbitrary",
        300,
    )
    assert result.exit_code == 0, result.output
    layers, tasks = read_tasks(out)
    assert len(tasks) == 2 * 300  # each forward and backward
    assert {task.layer for task in tasks} == set(range(len(layers)))
    assert f"600 calls of {len(layers)} layers" in result.output


@pytest.mark.slow
def test_layers_of_models_are_listed(tmp_path, monkeypatch):
    make_torchvision_importable()
    pytest.importorskip("timm")
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setattr(torchvision.models, "list_models", lambda module: ["squeezenet1_1"])
    for name, value in (("_VIDEO", ()), ("_DENSE", ()), ("_by_family", lambda names: []), ("_PLAIN", re.compile("$x"))):
        monkeypatch.setattr(collect, name, value)
    out = tmp_path / "tasks.json.gz"
    result = invoke(
        "draw",
        "convolutions",
        "--out",
        out,
        "--stop-after",
        60,
        "--resolutions",
        1,
        "--configurations",
        500,
        "--random",
        0,
    )
    assert result.exit_code == 0, result.output
    layers, _ = read_tasks(out)
    assert (64, 3, 3, 3) in {layer.weight for layer in layers}  # SqueezeNet's first layer


def test_fitting_needs_a_folder_or_held_out_layers(tmp_path):
    assert isinstance(invoke("train", "convolutions", tmp_path / "x").exception, InvalidValue)
    described = invoke("train", "convolutions", tmp_path / "x", "--out", tmp_path, "--describe", "H200").exception
    assert isinstance(described, InvalidValue) and "JSON" in str(described)
    alone = invoke("train", "convolutions", tmp_path / "x", "--add", "--out", tmp_path).exception
    assert isinstance(alone, InvalidValue) and "--trials" in str(alone)
    empty = invoke("train", "convolutions", tmp_path / "x", "--trials", "--add", "--out", tmp_path).exception
    assert isinstance(empty, InvalidValue) and "trial_trees.xz" in str(empty)


@pytest.mark.slow
def test_layers_that_were_held_out_are_scored_and_few_calls_make_no_table(tmp_path):
    pytest.importorskip("sklearn")
    measured = Path(__file__).parents[1] / "virtual" / "data" / "held_out_convolutions_h200.jsonl.gz"
    printed = invoke("train", "convolutions", measured, "--held-out", "--leaves", 50).output
    assert printed.count("held out, odd channels: {'problems': 27") == 3 and "'within_1_mib'" in printed
    failed = invoke(
        "train", "convolutions", measured, "--out", tmp_path, "--describe", '{"gpu": "NVIDIA H200"}'
    ).exception
    assert isinstance(failed, InvalidValue) and "more measured calls" in str(failed)


def test_measuring_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    failed = invoke("measure", "convolutions", tmp_path / "tasks.json.gz", "--out", tmp_path / "out.jsonl.gz").exception
    assert isinstance(failed, UllageError) and "GPU" in str(failed)


def test_most_arbitrary_channel_counts_are_not_multiples_of_eight():
    rows = list(arbitrary_configurations(2000))
    odd = sum(layer.input[0] % 8 > 0 or layer.weight[0] % 8 > 0 for layer, *_ in rows)
    assert odd > 0.8 * len(rows)
    assert {layer.weight[-1] for layer, *_ in rows} >= {1, 3, 5, 7}
    assert len(Counter(batch for _, batch, *_ in rows)) > 60


def test_arbitrary_calls_stay_small_enough_to_measure_quickly():
    rows = list(arbitrary_configurations(2000))
    assert all(min(layer.output()) > 0 for layer, *_ in rows)
    assert max(tensor_bytes(layer, batch, TYPES[kind]) for layer, batch, kind, _ in rows) <= 1_200_000_000
    assert sum(operations(layer, batch) for layer, batch, *_ in rows) / len(rows) < 20e9


def test_any_beginning_of_the_list_is_the_same_list():
    assert list(arbitrary_configurations(50)) == list(arbitrary_configurations(80))[:50]
