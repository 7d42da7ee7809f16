"""The estimators that come with Ullage: walknet, walknet+transformer and fast answer for any model by name."""

import pytest
import torch
from tests.paths import ROOT

import ullage
from ullage.errors import InvalidValue
from ullage.estimation.estimators.registry import find
from ullage.hardware import gpu
from ullage.jobs import Model
from ullage.jobs.job import JobRequest
from ullage_lab.estimators.fast import trained as trained_fast
from ullage_lab.estimators.walknet.networks import SHIPPED, load, shipped

GIB = 1 << 30
LEARNED = ("walknet", "walknet+transformer", "fast")
MLP = Model("mlp:x", settings={"widths": [2048, 4096, 4096, 1000]}, batch_size=256, optimizer="adam")
CNN = Model(
    "ullage_lab.networks.generated:cnn", batch_size=32, optimizer="sgd", input_shape=[3, 96, 96],
    num_classes=10,
    settings={"arch": "pyramid", "filters": [32, 64, 128], "kernels": [3, 3, 3], "down": [1, 2], "batch_norm": True},
)  # fmt: skip
ENCODER = Model(
    "ullage_lab.networks.generated:transformer", batch_size=16, optimizer="adamw", sequence_length=128,
    precision="bf16", num_classes=10,
    settings={"kind": "encoder", "vocabulary": 5000, "length": 128, "size": 256, "layers": 4, "heads": 4,
              "middle": 1024},
)  # fmt: skip


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("job", [MLP, CNN, ENCODER], ids=["mlp", "cnn", "transformer"])
def test_the_answer_is_near_that_of_the_virtual_gpu(name: str, job: Model) -> None:
    ours = find("ullage").estimate(JobRequest(job), gpu("H200"))
    e = find(name).estimate(JobRequest(job), gpu("H200"))
    assert e.figure_kind == "process" and e.upper >= e.figure
    assert ours.process_memory is not None
    slack = 1.5 * GIB if name != "fast" else 0.4 * ours.process_memory
    assert abs(e.figure - ours.process_memory) <= slack, (e.figure, ours.process_memory)


@pytest.mark.parametrize("family", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize("estimator", ["mlp", "transformer"])
def test_weights_have_a_card_and_a_sensible_size(family: str, estimator: str) -> None:
    file = shipped(family, estimator)
    network, card = load(file)
    assert (card.family, card.estimator, card.bin, card.gpu) == (family, estimator, GIB, "H200")
    assert card.rows > 500 and card.test and card.versions["measured with torch"]
    assert 0.5 < card.figures["test"]["accuracy"] <= 1 and len(card.figures["validation"]) == 3
    assert file.stat().st_size < 2 << 20
    assert all(torch.isfinite(value).all() for value in network.state_dict().values())


def test_the_cards_name_every_file() -> None:
    text = (SHIPPED / "walknet.md").read_text() + (SHIPPED / "fast.md").read_text()
    files = sorted([*SHIPPED.glob("walknet_*.safetensors"), SHIPPED / "fast.safetensors"])
    assert len(files) == 7
    for file in files:
        assert file.name in text


def test_bins_can_be_wider_and_the_sum_stays() -> None:
    narrow, wide = (
        find("walknet").estimate(JobRequest(MLP, options=options), gpu("H200")) for options in ({}, {"bin": "8GiB"})
    )
    assert wide.figure % (8 * GIB) == 0 and wide.figure >= narrow.figure
    with pytest.raises(InvalidValue, match=r"a multiple of 1.00 GiB; found '1500MiB'"):
        find("walknet").estimate(JobRequest(MLP, options={"bin": "1500MiB"}), gpu("H200"))


def test_fast_has_a_bound_that_was_calibrated() -> None:
    card = trained_fast().card
    assert card["generated"]["covered"] >= 0.985 and card["real"]["covered"] >= 0.985
    assert card["real"]["jobs"] > 100


def test_another_gpu_is_said_to_be_another_one() -> None:
    e = find("walknet").estimate(JobRequest(MLP), gpu("A100-40GB"))
    assert any("trained on an H200 alone" in note for note in e.notes)


def test_they_answer_for_real_models_by_name() -> None:
    pytest.importorskip("torchvision")
    for name in LEARNED:
        e = ullage.estimate("torchvision:resnet18", batch_size=16, estimator=name)
        assert e.estimator == name and GIB <= e.figure <= 6 * GIB


def test_inference_is_refused_with_the_reason() -> None:
    job = Model("mlp:x", settings={"widths": [8, 4]}, batch_size=2, inference=True)
    with pytest.raises(InvalidValue, match="this is inference"):
        find("fast").estimate(JobRequest(job), gpu("H200"))


def test_the_data_that_they_were_trained_on_are_in_the_source() -> None:
    pytest.importorskip("polars")
    from ullage_lab.train.protocol import key_of, read_rows

    file = ROOT / "benchmarks" / "data" / "generated_h200.parquet"
    keys = {key_of(row) for row in read_rows(file, "cnn")}
    _, card = load(shipped("cnn", "mlp"))
    assert set(card.test) <= keys and len(card.test) == pytest.approx(0.3 * len(keys), rel=0.02)
