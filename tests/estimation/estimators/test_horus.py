"""Horus against the figures that were published with its evaluation."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

import ullage
from ullage.errors import InvalidValue
from ullage.estimation.estimators import horus
from ullage.estimation.estimators.printed_summary import read_summary
from ullage.estimation.estimators.registry import find
from ullage.hardware import gpu
from ullage.jobs import Model
from ullage.jobs.job import JobRequest, Summary, request_of

# Published with the evaluation: neurons in a layer, layers, GiB for a batch of 32 of MNIST
FULLY_CONNECTED = {
    (1, 1): 0.000100273638963699,
    (101, 11): 0.0226706154644489,
    (201, 211): 1.07289439812302,
    (1050, 351): 47.629116103053,
    (2500, 101): 77.1392812952399,
}
# and MiB for real models with a batch of 32
REAL_MODELS = [
    ("resnet50", 7903.9316, 1e-5),
    ("mobilenet_v2", 3617.0674, 1e-5),
    ("efficientnet_b0", 3864.9053, 1e-5),
    ("vgg16", 21525.8262, 1e-3),
]

TORCHSUMMARY = """
----------------------------------------------------------------
        Layer (type)               Output Shape         Param #
================================================================
            Conv2d-1           [-1, 32, 26, 26]             320
         MaxPool2d-2           [-1, 32, 13, 13]               0
           Dropout-3           [-1, 32, 13, 13]               0
            Linear-4                   [-1, 10]          54,090
================================================================
Total params: 54,410
"""

TORCHINFO = """
==========================================================================================
Layer (type:depth-idx)                   Output Shape              Param #
==========================================================================================
Net                                      [16, 10]                  --
├─Sequential: 1-1                        [16, 32, 26, 26]          --
│    └─Conv2d: 2-1                       [16, 32, 26, 26]          320
│    └─ReLU: 2-2                         [16, 32, 26, 26]          --
├─Linear: 1-2                            [16, 10]                  54,090
==========================================================================================
Total params: 54,410
"""


def fully_connected(width: int, depth: int) -> float:
    """The estimate for a network on MNIST, in GiB."""
    parameters = 785 * width + (depth - 1) * (width * width + width) + 10 * width + 10
    return sum(horus.formula(32, depth * width + 10, parameters).values()) / 2**30


@pytest.mark.parametrize(("width", "depth"), FULLY_CONNECTED)
def test_published_figures_of_fully_connected_networks_come_out(width: int, depth: int) -> None:
    assert fully_connected(width, depth) == pytest.approx(FULLY_CONNECTED[width, depth], rel=1e-9)


def test_every_published_fully_connected_figure_is_reproduced(reference: Callable[[str], Path]) -> None:
    with reference("reference/horus_fc_a100.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["model"] == "FC on MNIST"]
    assert len(rows) > 400
    for row in rows:
        found = fully_connected(int(float(row["neurons"])), int(float(row["layers"])))
        assert found == pytest.approx(float(row["horus_memory_estimation_formula"]), rel=1e-9)


def test_a_network_configuration_gives_the_published_figure() -> None:
    workload = JobRequest(
        Model("mlp:x", settings={"widths": [784, *[101] * 11, 10], "act": "Identity"}, batch_size=32),
        options={"overhead_mib": 0},
    )
    found = find("horus").estimate(workload, gpu("A100-40GB")).figure / 2**30
    assert found == pytest.approx(FULLY_CONNECTED[101, 11], rel=1e-9)


@pytest.mark.parametrize(("name", "mib", "within"), REAL_MODELS)
def test_real_models_give_the_published_figures(name: str, mib: float, within: float) -> None:
    found = ullage.estimate(f"torchvision:{name}", batch_size=32, gpu="A100-40GB", estimator="horus")
    assert found.figure / 2**20 == pytest.approx(mib, rel=within)


def test_a_torchsummary_text() -> None:
    summary = read_summary(TORCHSUMMARY)
    assert [layer.kind for layer in summary.layers] == ["Conv2d", "MaxPool2d", "Dropout", "Linear"]
    assert (summary.parameters, summary.batch_size) == (54_410, None)
    assert horus.activations(summary) == 32 * 26 * 26 + 10  # pooling and dropout are not counted
    with pytest.raises(InvalidValue, match="--batch-size"):
        find("horus").estimate(JobRequest(Summary("x.txt", TORCHSUMMARY)), gpu("T4"))


def test_a_torchinfo_text_counts_layers_and_not_what_holds_them() -> None:
    summary = read_summary(TORCHINFO)
    assert [layer.kind for layer in summary.layers] == ["Conv2d", "ReLU", "Linear"]
    assert (summary.parameters, summary.batch_size) == (54_410, 16)
    found = find("horus").estimate(JobRequest(Summary("x.txt", TORCHINFO)), gpu("T4"))
    assert found.figure == 4 * (16 * (2 * 32 * 26 * 26 + 10 + 54_410) + 54_410) + (800 << 20)


def test_further_columns_and_capitals_change_nothing() -> None:
    wide = TORCHINFO.replace("Output Shape  ", "Input Shape               Output Shape  ")
    wide = wide.replace("Net      ", "Net      [1]                       ").replace("Net      [1]", "Net      ")
    rows = [
        line if "[16" not in line else f"{line[:41]}{'[16, 1, 28, 28]':26}{line[41:]}" for line in wide.splitlines()
    ]
    rows = [line.replace("Net                                      " * 2, "Net") for line in rows]
    text = "\n".join(rows).replace("Conv2d", "CONV2D").replace("ReLU", "relu")
    assert read_summary(text) == read_summary(TORCHINFO)


def test_wrong_sums_of_layers_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidValue, match="54,410 parameters, but they have 54,090; .* depth=99"):
        read_summary(TORCHSUMMARY.replace(" 320", " 0"))
    cut = TORCHSUMMARY.partition("Total")[0]
    assert any("cut off" in note for note in read_summary(cut).notes) and not read_summary(TORCHSUMMARY).notes


def test_printed_modules_do_not_excuse_a_tables_sum() -> None:
    with pytest.raises(InvalidValue, match="54,410 parameters, but they have 54,090"):
        read_summary(TORCHSUMMARY.replace(" 320", " 0") + "Linear(in_features=1, out_features=1), 2 params\n")
    assert read_summary(TORCHINFO.replace("--\n├", "²\n├")).parameters == 54_410


@pytest.mark.parametrize("number", ["9" * 30, "9" * 5000])
def test_numbers_that_no_layer_has_are_refused(number: str) -> None:
    for text in (TORCHSUMMARY.replace("[-1, 10]", f"[-1, {number}]"), TORCHSUMMARY.replace(" 320", f" {number}")):
        with pytest.raises(InvalidValue, match="at most"):
            read_summary(text)


def test_a_block_whose_inside_is_not_shown_is_named() -> None:
    notes = read_summary(TORCHINFO.replace("Conv2d", "BasicBlock")).notes
    assert notes == ("the text does not show what is inside BasicBlock: print it with torchinfo, depth=99",)


PRINTED = """Net(
  (words): Embedding(100, 8), 800 params
  (norm): LayerNorm((8,), eps=1e-05, elementwise_affine=True), 16 params
  (attention): Attention(
    (mixed): Conv1D(), 216 params
    (out): Conv1D(), 72 params
    (drop): Dropout(p=0.1, inplace=False), 0 params
  ), 288 params
  (head): Linear(in_features=8, out_features=100, bias=False), 800 params
), 1,904 params
"""


def test_printed_modules_have_outputs_by_sequence_length(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="--sequence-length 512"):
        read_summary(PRINTED)
    summary = read_summary(PRINTED, 5)
    widths = {"Embedding": 8, "LayerNorm": 8, "Dropout": 8, "Linear": 100}
    assert [layer.outputs for layer in summary.layers] == [5 * width for width in (8, 8, 24, 8, 8, 100)]
    assert {layer.kind: layer.outputs for layer in summary.layers if layer.kind in widths} == {
        kind: 5 * width for kind, width in widths.items()
    }
    assert summary.parameters == 1904
    file = tmp_path / "net.model"
    file.write_text(PRINTED)
    request = request_of(file, {"batch_size": 2, "sequence_length": 5}, "horus")
    figure = find("horus").estimate(request, gpu("T4")).figure
    assert figure > 800 << 20
    assert ullage.estimate(file, batch_size=2, sequence_length=5, gpu="T4", estimator="horus").figure == figure
    named = file.rename(tmp_path / "net_bs=2_sl=5.txt")  # as GPUMemNet's authors name theirs
    assert ullage.estimate(named, gpu="T4", estimator="horus").figure == figure


@pytest.mark.parametrize("name", ["horus", "gpumemnet", "gpumemnet+transformer"])
def test_a_summary_of_100000_layers_is_read(name: str) -> None:
    rows = [f"{f'Linear-{place}':>20} {'[-1, 100]':>25} {'10,100':>15}" for place in range(100_000)]
    text = "\n".join([*rows, f"Total params: {100_000 * 10_100:,}"])
    assert find(name).estimate(JobRequest(Summary("x.txt", text, 4)), gpu("H200")).figure > 0


def test_modules_printed_without_parameters_say_what_to_print() -> None:
    text = "Net(\n  (norm): LayerNorm((8,), eps=1e-05)\n  (head): Linear(in_features=8, out_features=9)\n)\n"
    with pytest.raises(InvalidValue, match=r"print\(model\) shows has none: print it with torchinfo, .* depth=99"):
        read_summary(text)


def test_half_a_summary_is_read_with_a_note_or_refused() -> None:
    for text in (TORCHSUMMARY, TORCHINFO, PRINTED):
        for end in range(0, len(text), 7):
            try:
                summary = read_summary(text[:end], 5)
            except InvalidValue as error:
                assert "\n" not in str(error)
            else:
                assert "Total" in text[:end] or any("cut off" in note for note in summary.notes)


@pytest.mark.parametrize(
    "text", ["Schicht (Typ)  Ausgabe\nFaltung-1  32  320\n", "层 (类型) 输出\n卷积-1 [１, ２] ３\n"]
)
def test_a_summary_in_another_language_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="no layers found"):
        read_summary(text)


def test_the_authors_summaries_are_read(reference: Callable[[str], Path]) -> None:
    tested_on = [file for file in reference("reference/gpumemnet").iterdir() if file.suffix in (".model", ".txt")]
    assert len(tested_on) == 37 and all(read_summary(file.read_text(), 512).layers for file in tested_on)
    files = sorted(reference("reference/carma").glob("*.model"))
    summaries = {file.stem: read_summary(file.read_text(), 512) for file in files}
    assert len(summaries) == 35
    assert summaries["UNet"].parameters == 24_439_269
    assert sum(layer.outputs for layer in summaries["UNet"].layers) == 45_613_056  # as its last lines say
    assert summaries["xlnet_base_cased"].parameters == 81_874_178
    assert {name for name, summary in summaries.items() if any("not show" in note for note in summary.notes)} == {
        "UNet",
        "efficientNet_cifar100",
        "maskrcnn",
        "mobilenet_cifar100",
    }


@pytest.mark.parametrize("text", ["", "nothing here", "Linear [10]"])
def test_a_text_that_is_no_summary_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="no layers found"):
        read_summary(text)


def test_a_file_is_read_through_the_public_face(tmp_path: Path) -> None:
    file = tmp_path / "net.txt"
    file.write_text(TORCHSUMMARY)
    found = ullage.estimate(file, batch_size=8, gpu="T4", estimator="horus")
    assert found.figure == sum(horus.formula(8, 32 * 26 * 26 + 10, 54_410, overhead=800 << 20).values())
    with pytest.raises(InvalidValue, match="only batch_size and sequence_length count"):
        request_of(file, {"batch_size": 8, "optimizer": "sgd"}, "horus")
    with pytest.raises(InvalidValue, match="a summary has no code"):
        ullage.estimate(file, batch_size=8, gpu="T4")
    with pytest.raises(InvalidValue, match="cannot read"):
        ullage.estimate(tmp_path / "missing.txt", batch_size=8, gpu="T4", estimator="horus")
