"""Configurations of training runs: good ones build, bad ones get one clear message."""

import pytest

from ullage.errors import InvalidValue, UllageError, UnknownName
from ullage.jobs import Model, build
from ullage.jobs.job import request_of


@pytest.mark.parametrize(
    ("model", "near"), [("tv:resnet51", "resnet50"), ("timm:vit_smal_patch16_224", "vit_small_patch16_224")]
)
def test_a_misspelt_model_gets_the_nearest_names(model, near):
    with pytest.raises(UnknownName, match=near):
        build(Model(model, batch_size=1, input_shape=[3, 32, 32]))


def test_a_model_is_built_outside_a_virtual_gpu():
    model = build(Model("tv:resnet18", batch_size=1, input_shape=[3, 32, 32], num_classes=7))
    assert model.fc.out_features == 7 and not model.fc.weight.is_cuda


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"name": "resnet18", "batch_size": 1}, "did you mean torchvision:resnet18"),
        ({"name": "mlp:x", "batch_size": 1}, "'widths'"),
        ({"name": "tv:resnet18", "batch_size": 0}, "batch_size must be a whole number"),
        ({"name": "tv:resnet18", "batch_size": 1, "input_shape": [3, -1, 3]}, "input_shape"),
        (
            {"name": "mlp:x", "batch_size": 1, "settings": {"widths": [2, 2]}, "optimizer": "adamm"},
            "did you mean 'adam'",
        ),
        ({"name": "mlp:x", "batch_size": 1, "settings": {"widths": [2, 2]}, "optimizer": "LBFGS"}, "closure"),
        ({"name": "mlp:x", "batch_size": 1, "settings": {"widths": [2, 2]}, "precision": "amp_fp61"}, "amp_fp16"),
        ({"name": "mlp:x", "batch_size": 1, "settings": {"widths": [2, 2]}, "attention": "flsh"}, "flash"),
    ],
)
def test_a_bad_configuration_says_what_is_needed(values, text):
    with pytest.raises(UllageError, match=text):
        Model(**values)


def test_the_public_names_of_options():
    made = Model(
        "timm:resnet18", batch_size=4, input_shape=(3, 32, 32), optimizer="NAdam", gradient_accumulation=2, freeze="a"
    )
    assert (made.batch_size, made.input_shape, made.optimizer) == (4, [3, 32, 32], "NAdam")
    assert (made.gradient_accumulation, made.freeze) == (2, ("a",))
    with pytest.raises(UnknownName, match="batch_size"):
        request_of("timm:resnet18", {"batchsize": 4})


def test_a_row_that_is_no_run():
    with pytest.raises(InvalidValue, match="to describe a training run"):
        Model.from_row({"batch": 3})


def test_a_row_reads_both_batch_size_keys_and_writes_one():
    old, new = ({"model": "mlp:x", "widths": [8, 4], key: 3} for key in ("batch", "batch_size"))
    assert Model.from_row(old) == Model.from_row(new)
    assert Model.from_row(Model.from_row(new).to_row()) == Model.from_row(old)
    assert list(Model.from_row(new).to_row())[:3] == ["model", "batch", "opt"]
