"""The tables of Accelerate's documentation (docs/source/usage_guides/model_size_estimator.md)."""

import functools

import pytest
import torch

import ullage
from ullage.errors import InvalidValue
from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable
from ullage_lab.estimators.accelerate import sizes


@functools.cache
def resnet50() -> torch.nn.Module:
    make_torchvision_importable()
    return pytest.importorskip("timm").create_model("resnet50")


@pytest.mark.parametrize(
    ("dtype", "largest", "total", "training"),
    [
        ("float32", "9.0", "97.7", "390.78"),
        ("float16", "4.5", "48.85", "195.39"),
        ("int8", "2.25", "24.42", None),
        ("int4", "1.12", "12.21", None),
    ],
)
def test_the_table_of_timm_resnet50(dtype: str, largest: str, total: str, training: str | None) -> None:
    row = sizes(resnet50(), dtype)
    assert round(row.largest_layer / 2**20, 2) == float(largest)
    assert round(row.total / 2**20, 2) == float(total)
    assert (row.training and round(row.training / 2**20, 2)) == (training and float(training))


@pytest.mark.slow
def test_the_table_of_bert_base_cased() -> None:
    make_torchvision_importable()
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(vocab_size=28996))
    model._no_split_modules = ["BertLayer"]  # as transformers had it when the table was made
    row = sizes(model)
    assert f"{row.largest_layer / 2**20:.2f}" == "84.95"
    assert row.total / 2**20 == pytest.approx(413.18, abs=0.01)
    assert row.training is not None and f"{row.training / 2**30:.2f}" == "1.61"


@pytest.mark.slow
def test_it_is_four_times_the_model_whatever_the_batch() -> None:
    small, large = (ullage.estimate("torchvision:resnet18", batch_size=b, estimator="accelerate") for b in (1, 512))
    assert small.figure == large.figure == 4 * small.breakdown["parameters"]


def test_a_type_without_training_is_refused() -> None:
    with pytest.raises(InvalidValue, match="no training memory for int8"):
        ullage.estimate(
            ullage.Model("torchvision:resnet18", settings={"accelerate.dtype": "int8"}), estimator="accelerate"
        )
    with pytest.raises(InvalidValue, match="dtype must be one of"):
        ullage.estimate(
            ullage.Model("torchvision:resnet18", settings={"accelerate.dtype": "fp12"}), estimator="accelerate"
        )
