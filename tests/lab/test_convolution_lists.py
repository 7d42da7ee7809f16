"""Convolutions that are drawn to ask cuDNN about, and what is fitted to its answers."""

import json
import re
from collections import Counter

import pytest
from typer.testing import CliRunner

from ullage.cli.main import app
from ullage.errors import InvalidValue
from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable
from ullage_lab.draw import convolutions as drawing
from ullage_lab.draw.convolutions import arbitrary_configurations, arrange, random_problems
from ullage_lab.draw.layers import ConvolutionLayer, operations, tensor_bytes


def invoke(*arguments):
    return CliRunner().invoke(app, ["lab", *map(str, arguments)])


@pytest.mark.slow
def test_layers_of_models_are_listed(monkeypatch):
    make_torchvision_importable()
    pytest.importorskip("timm")
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setattr(torchvision.models, "list_models", lambda module: ["squeezenet1_1"])
    for name, value in (("_VIDEO", ()), ("_DENSE", ()), ("_by_family", lambda names: []), ("_PLAIN", re.compile("$x"))):
        monkeypatch.setattr(drawing, name, value)
    result = invoke("draw", "problems", "--models", "60s", "--configurations", 500)
    assert result.exit_code == 0, result.output
    weights = {tuple(json.loads(line)["problem"][2]) for line in result.stdout.splitlines() if line.startswith("{")}
    assert (64, 3, 3, 3) in weights  # SqueezeNet's first layer


def test_layer_configurations_exclude_too_large_ones():
    small = ConvolutionLayer((8, 9, 9), (16, 8, 3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    large = small._replace(input=(8, 4000, 4000))
    found = list(arrange(Counter([small, large]), 10_000))
    assert {one.layer for one in found if one.batch > 64} == {small}
    assert len(found) == len(set(found)) and found == list(arrange(Counter([small, large]), 10_000))
    assert list(arrange(Counter([small, large]), 5)) == found[:5]


def test_something_to_draw_has_to_be_named():
    assert isinstance(invoke("draw", "problems").exception, InvalidValue)


def test_fitting_needs_a_folder_or_held_out_layers(tmp_path):
    assert isinstance(invoke("train", "convolutions", tmp_path / "x").exception, InvalidValue)
    described = invoke("train", "convolutions", tmp_path / "x", "--out", tmp_path, "--describe", "H200").exception
    assert isinstance(described, InvalidValue) and "JSON" in str(described)
    alone = invoke("train", "convolutions", tmp_path / "x", "--add", "--out", tmp_path).exception
    assert isinstance(alone, InvalidValue) and "--trials" in str(alone)
    empty = invoke("train", "convolutions", tmp_path / "x", "--trials", "--add", "--out", tmp_path).exception
    assert isinstance(empty, InvalidValue) and "trial_trees.xz" in str(empty)


def test_held_out_layers_are_scored_and_few_make_no_table(tmp_path):
    pytest.importorskip("sklearn")
    answers = tmp_path / "plans.jsonl"
    rows = ({"problem": one, "candidates": [[1, 0, 512 * one.groups]]} for one in random_problems(200, seed=3))
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = invoke("train", "convolutions", answers, "--held-out", "--leaves", 50).output
    assert printed.count("held out, odd channels: {'problems': ") == 3 and "'within_1_mib'" in printed
    words = ("train", "convolutions", answers, "--out", tmp_path, "--describe", '{"gpu": "NVIDIA H200"}')
    failed = invoke(*words).exception
    assert isinstance(failed, InvalidValue) and "more problems" in str(failed)


def test_few_arbitrary_channel_counts_are_multiples_of_eight():
    rows = list(arbitrary_configurations(2000))
    odd = sum(layer.input[0] % 8 > 0 or layer.weight[0] % 8 > 0 for layer, *_ in rows)
    assert odd > 0.8 * len(rows)
    assert {layer.weight[-1] for layer, *_ in rows} >= {1, 3, 5, 7}
    assert len(Counter(batch for _, batch, *_ in rows)) > 60


def test_arbitrary_calls_stay_small_enough_to_measure_quickly():
    rows = list(arbitrary_configurations(2000))
    assert all(min(layer.output()) > 0 for layer, *_ in rows)
    assert max(tensor_bytes(layer, batch, kind) for layer, batch, kind, _ in rows) <= 1_200_000_000
    assert sum(operations(layer, batch) for layer, batch, *_ in rows) / len(rows) < 20e9


def test_any_beginning_of_the_list_is_the_same_list():
    assert list(arbitrary_configurations(50)) == list(arbitrary_configurations(80))[:50]
