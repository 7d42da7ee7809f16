"""Drawn configurations: the same for the same seed, feasible, and usable wherever a configuration is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage.errors import InvalidValue, UnknownName
from ullage.jobs import Model, train
from ullage.jobs.sources.build import prepare
from ullage.units import GIB
from ullage_lab.draw.generated import (
    CLASS,
    CNN_FORMS,
    DEFAULTS,
    DrawingLimits,
    draw,
    generate,
    image_sides,
    ranges,
    summary,
)

FAMILIES = ("mlp", "cnn", "transformer")
SMALL = {
    "mlp": {"inputs": (4, 64), "classes": (1, 16), "batch": (4, 16)},
    "cnn": {"side": (16, 32), "classes": (2, 8), "filters": (4, 16), "depth": (1, 9), "batch": (2, 4)},
    "transformer": {
        "vocabulary": (50, 100),
        "words_vocabulary": (50, 100),
        "length": [8, 16],
        "size": (64, 128),
        "layers": (2, 4),
        "heads": [2, 4],
        "classes": (4, 9),
        "batch": (1, 4),
    },
}


def small(family: str, count: int, seed: int = 0, **more: Any) -> list[dict[str, Any]]:
    return list(generate(family, count, seed, DEFAULTS[family] | SMALL[family] | {"balanced": (0.0,)} | more))


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_seeds_give_equal_rows_and_larger_sets_more(family: str) -> None:
    first = [json.dumps(row) for row in generate(family, 12, 5)]
    assert first == [json.dumps(row) for row in generate(family, 12, 5)]
    assert first[:4] == [json.dumps(row) for row in generate(family, 4, 5)]
    assert first != [json.dumps(row) for row in generate(family, 12, 6)]


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_parameters_are_those_of_the_model(family: str) -> None:
    for row in small(family, 40):
        configuration = Model.from_row(row)
        model, task = prepare(configuration)
        assert sum(parameter.numel() for parameter in model.parameters()) == row["parameters"], row
        inputs, targets = task.batch(configuration.batch_size)
        out = model(inputs)
        words = row["settings"].get("head") == "words"
        wanted = (*inputs.shape, row["settings"]["vocabulary"]) if words else (configuration.batch_size, row["classes"])
        assert tuple(out.shape) == wanted
        assert task.loss(out, targets).dim() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_rows_train(family: str) -> None:
    for row in small(family, 6, seed=1, precision={"fp32": 1.0}):
        steps = iter(range(9))
        train(Model.from_row(row), 2, device="cpu", after_iteration=steps.__next__)
        assert next(steps) == 2


def test_images_are_never_smaller_than_the_filters() -> None:
    for row in generate("cnn", 200, 3):
        settings = row["settings"]
        sides = image_sides(row["input"][-1], len(settings["kernels"]), settings["down"])
        assert all(side >= kernel for side, kernel in zip(sides, settings["kernels"], strict=True))


def test_values_stay_in_their_ranges() -> None:
    for row in generate("mlp", 300, 3):
        assert 4 <= row["input"][0] <= 4096 and 4 <= row["batch"] <= 1024 and row["classes"] <= 1024
        assert 2 <= len(row["settings"]["widths"]) <= 12
    for row in generate("transformer", 100, 3):
        settings = row["settings"]
        assert 128 <= settings["size"] <= 2048 and settings["size"] % settings["heads"] == 0
        assert 2 <= settings["layers"] <= 39


@pytest.mark.parametrize("family", ("cnn", "transformer"))
def test_every_class_of_memory_is_populated_and_the_limit_kept(family: str) -> None:
    rows = list(generate(family, 150, 4))
    found = summary(rows)
    assert set(found["classes"]) == {0, 1, 2, 3, 4}
    assert min(found["classes"].values()) >= 5
    assert found["largest"] <= 40 * GIB
    assert found["largest"] // CLASS[family] == 4, "the classes are those of the largest too"


def test_half_train_with_adam_and_half_in_32_bits() -> None:
    found = summary(list(generate("transformer", 400, 9)))
    assert 150 < found["opt"]["adam"] < 250
    assert 150 < found["precision"]["fp32"] < 250
    assert len(found["opt"]) == 8 and len(found["precision"]) == 4


def test_all_forms_are_drawn() -> None:
    assert {row["arch"] for row in generate("cnn", 100, 2)} == set(CNN_FORMS)
    rows = list(generate("transformer", 100, 2))
    assert {row["arch"] for row in rows} == {"encoder", "decoder", "hybrid"}
    assert {row["settings"]["conv1d"] for row in rows} == {True, False}


def test_an_infeasible_search_is_reported() -> None:
    with pytest.raises(InvalidValue, match="no feasible cnn in 3000 draws"):
        draw("cnn", 0, 0, DEFAULTS["cnn"], DrawingLimits(memory=GIB // 8))
    with pytest.raises(InvalidValue, match="no feasible mlp"):
        draw("mlp", 0, 0, DEFAULTS["mlp"], DrawingLimits(least_seconds=0.1))


def test_a_file_overrides_ranges(tmp_path: Path) -> None:
    file = tmp_path / "ranges.toml"
    file.write_text('[cnn]\nside = [40, 41]\narch = ["dense"]\noptimizer = { sgd = 1 }\n[mlp]\nbatch = [8, 8]\n')
    known = ranges("cnn", file)
    assert known["side"] == (40, 41) and known["batch"] == DEFAULTS["cnn"]["batch"]
    for row in generate("cnn", 20, 0, known):
        assert row["arch"] == "dense" and row["opt"] == "sgd" and row["input"][-1] in (40, 41)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cnn]\nsides = [1, 2]", "no setting of \\[cnn\\] in .* named 'sides'; did you mean 'side'"),
        ("[cnn]\nside = [64, 32]", "the smaller one first, got \\[64, 32\\]"),
        ("[cnn]\nside = 32", "must be two whole numbers, \\[from, to\\], got 32"),
        ("[cnn]\nside = [1.5, 3]", "must be two whole numbers"),
        ('[cnn]\narch = ["pyramids"]', "did you mean 'pyramid'"),
        ("[cnn]\nkernel = [2, 4]", "odd sizes"),
        ("[cnn]\noptimizer = { adem = 1 }", "did you mean 'adam'"),
        ("[cnn]\noptimizer = { adam = 0 }", "weight of adam must be above 0"),
        ("[cnn]\nbalanced = 2", "share from 0 to 1"),
        ("[cmm]\nside = [1, 2]", "no table in .* named 'cmm'"),
        ("[cnn", "must be TOML"),
    ],
)
def test_bad_ranges_get_a_clear_message(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "ranges.toml"
    file.write_text(text)
    with pytest.raises((InvalidValue, UnknownName), match=message):
        ranges("cnn", file)


def test_unknown_families_are_named() -> None:
    with pytest.raises(UnknownName, match="did you mean 'cnn'"):
        ranges("cn")


def test_gpt2_projections_are_transposed_linear_layers() -> None:
    from ullage_lab.networks.generated import Conv1D

    layer = Conv1D(6, 4)
    states = torch.randn(2, 3, 6)
    assert torch.allclose(layer(states), torch.nn.functional.linear(states, layer.weight.T, layer.bias), atol=1e-6)
