"""gpumemnet is the published method: its features are counted by hand here, and nothing of ours is used."""

import ast
import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ullage
from ullage.errors import InvalidValue
from ullage.estimation.estimators.gpumemnet import features
from ullage.estimation.estimators.gpumemnet.features import (
    FAMILIES,
    LONGEST,
    family_of,
    names_of,
    summary_of,
    totals_of,
    tuples_of,
    type_of,
)
from ullage.estimation.estimators.gpumemnet.networks import WIDTHS, Perceptrons, build, jobs_of, load, shipped
from ullage.estimation.estimators.printed_summary import ModelSummary, SummaryLayer, read_summary
from ullage.estimation.estimators.registry import JobRequest, find
from ullage.estimation.estimators.weights import SHIPPED, ModelCard, probabilities
from ullage.hardware import gpu
from ullage.jobs import Model

GIB = 1 << 30
HOME = Path(features.__file__).parent
DATA = Path(__file__).parents[3] / "benchmarks" / "data" / "generated_h200.parquet"
MLP = Model("mlp:x", settings={"widths": [2048, 4096, 4096, 1000]}, batch_size=256, optimizer="adam")


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.Conv2d(4, 6, 3),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


class SmallTransformer(nn.Module):
    """One block: an embedding, attention as a function, two linear layers, a norm and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.drop = nn.Embedding(50, 8), nn.LayerNorm(8), nn.Dropout(0.1)
        self.mixed, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.norm(self.words(ids))
        q, k, v = self.mixed(states).chunk(3, dim=-1)
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.out(self.drop(seen).mean(1))
        return out


def job(model: str, **more: object) -> Model:
    return Model(f"{Path(__file__)}:{model}", batch_size=10, **more)  # type: ignore[arg-type]


def test_the_features_of_an_mlp_are_those_counted_by_hand() -> None:
    summary = summary_of(Model("mlp:x", settings={"widths": [8, 4, 2]}, batch_size=16))
    assert summary.layers == (("Linear", 4, 8 * 4 + 4), ("ReLU", 4, 0), ("Linear", 2, 4 * 2 + 2))
    angle = math.pi * 6 / 11  # ReLU is the seventh of eleven functions
    expected = [16, 46, 4 + 4 + 2, 10 * 16, 2, 0, 0, math.sin(angle), math.cos(angle)]
    assert totals_of(summary, "mlp") == pytest.approx(expected)
    assert tuples_of(summary, "mlp") == [[0, 1, 4, 36], [1, 0, 4, 0], [0, 1, 2, 10]]


def test_the_features_of_a_cnn_are_those_counted_by_hand() -> None:
    summary = summary_of(job("small_cnn", input_shape=[3, 8, 8], num_classes=5))
    first, second = 4 * 8 * 8, 6 * 6 * 6  # activations after the convolutions
    weights = (3 * 9 + 1) * 4, 2 * 4, (4 * 9 + 1) * 6, (6 + 1) * 5
    activations = 3 * first + 3 * second + 6 + 6 + 5
    angle = math.pi / 10  # GELU is the second of ten functions
    counts = [3, 2, 1, 1]  # depth, convolutions, batch norms, dropouts
    expected = [10, sum(weights), activations, 10 * activations, *counts, math.sin(angle), math.cos(angle)]
    assert family_of(summary) == "cnn" and totals_of(summary, "cnn") == pytest.approx(expected)
    assert tuples_of(summary, "cnn")[:3] == [[0, 1, first, weights[0]], [0, 0, first, weights[1]], [1, 0, first, 0]]
    assert tuples_of(summary, "cnn")[-1] == [1, 1, 5, weights[3]]


def test_features_of_a_transformer_are_those_counted_by_hand() -> None:
    summary = summary_of(job("SmallTransformer", sequence_length=7, num_classes=3))
    weights = 50 * 8, 2 * 8, 9 * 24, 9 * 3
    activations = 7 * (8 + 8 + 24 + 8) + 3  # attention that is no layer of its own is in no summary
    assert family_of(summary) == "transformer"
    assert totals_of(summary, "transformer") == [10, sum(weights), activations, 10 * activations, 2, 2, 1, 1]
    assert tuples_of(summary, "transformer") == [
        [0, 1, 0, 0, 56, 400],
        [1, 0, 0, 0, 56, 16],
        [0, 0, 1, 0, 168, 216],
        [0, 0, 0, 1, 56, 0],
        [0, 0, 1, 0, 3, 27],
    ]


def torchsummary(model: nn.Module, batch: torch.Tensor) -> str:
    """The table that torchsummary prints: every module but containers, and the model itself."""
    rows: list[str] = []

    def note(part: nn.Module, inputs: object, output: torch.Tensor) -> None:
        own = sum(tensor.numel() for tensor in part.parameters(recurse=False))
        rows.append(f"{f'{type(part).__name__}-{len(rows) + 1}':>20} {[-1, *output.shape[1:]]!s:>25} {own:>15,}")

    for part in list(model.modules())[1:]:
        if not isinstance(part, nn.Sequential):
            part.register_forward_hook(note)
    model(batch)
    return "\n".join([*rows, f"Total params: {sum(tensor.numel() for tensor in model.parameters()):,}"])


def test_a_printed_summary_gives_the_same_features_as_the_model() -> None:
    text = torchsummary(small_cnn(), torch.zeros(2, 3, 8, 8))
    ours = summary_of(job("small_cnn", input_shape=[3, 8, 8], num_classes=5))
    assert read_summary(text)._replace(batch_size=10) == ours


def test_a_layer_named_as_a_module_of_pytorch_is_a_layer() -> None:
    text = "init-1  [-1, 3]  5\nfunctional-2  [-1, 4]  0\nTotal params: 5"
    assert read_summary(text).layers == (("init", 3, 5),) and type_of("init") == "init"


def test_the_authors_summary_gives_the_features_of_its_model(reference: Callable[[str], Path]) -> None:
    text = reference("reference/carma/resnet50_32.model").read_text()
    read, ours = read_summary(text)._replace(batch_size=32), summary_of(Model("torchvision:resnet50", batch_size=32))
    assert totals_of(read, "cnn") == totals_of(ours, "cnn") and tuples_of(read, "cnn") == tuples_of(ours, "cnn")


@pytest.mark.parametrize(
    "family", [each if each == "cnn" else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_rows_of_the_data_set_have_the_features_of_their_models(family: str) -> None:
    pytest.importorskip("polars")
    import json

    from ullage_lab.train.protocol import read_rows, summary_of_row

    rows = read_rows(DATA, family)
    assert all(family_of(summary_of_row(row)) == family for row in rows)
    for row in rows[:: len(rows) // 4]:
        found = summary_of(Model.from_row(json.loads(row["configuration"])))
        assert totals_of(found, family) == pytest.approx(totals_of(summary_of_row(row), family))
        assert tuples_of(found, family) == tuples_of(summary_of_row(row), family)


def test_the_published_modules_import_nothing_of_ours() -> None:
    code = (
        "import sys, ullage.estimation.estimators.gpumemnet.features, ullage.estimation.estimators.gpumemnet.networks\n"
        "print([name for name in sys.modules if name.startswith(('ullage.virtual', 'ullage.allocator')) "
        "or 'ullage_lab' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    files = sorted(HOME.glob("*.py"))
    assert {"estimator.py", "features.py", "networks.py"} <= {file.name for file in files}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not name.startswith(
                    ("ullage.virtual", "ullage.allocator", "ullage.estimation.estimators.summary")
                ), file
                assert not name.startswith("ullage_lab"), file


@pytest.mark.parametrize("name", ["gpumemnet", "gpumemnet+transformer"])
def test_an_estimate_uses_no_allocator_kernels_or_virtual_gpu(name: str, monkeypatch) -> None:
    from ullage.allocator.caching import CachingAllocator
    from ullage.virtual import VirtualGPU
    from ullage.virtual.cudnn import workspaces
    from ullage_lab.estimators.fast import rows as facts

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("this is ours")

    before = [find(name).estimate(JobRequest(one), gpu("H200")).figure for one in (MLP, CNN)]
    monkeypatch.setattr(CachingAllocator, "malloc", refuse)
    monkeypatch.setattr(VirtualGPU, "__enter__", refuse)
    monkeypatch.setattr(workspaces, "workspace", refuse)
    monkeypatch.setattr(facts, "features", refuse)
    with pytest.raises((AssertionError, InvalidValue), match="this is ours"):
        find("fast").estimate(JobRequest(MLP), gpu("H200"))
    after = [find(name).estimate(JobRequest(one), gpu("H200")).figure for one in (MLP, CNN)]
    assert before == after


CNN = job("small_cnn", input_shape=[3, 8, 8], num_classes=5)


@pytest.mark.parametrize("name", ["gpumemnet", "gpumemnet+transformer"])
def test_optimizer_and_precision_change_nothing(name: str) -> None:
    """They are not among the published features."""
    jobs = [MLP, dataclasses.replace(MLP, optimizer="sgd", precision="bf16")]
    first, second = (find(name).estimate(JobRequest(one), gpu("H200")) for one in jobs)
    assert first.figure == second.figure and first.notes == second.notes


def test_the_ensemble_is_the_mean_of_its_members() -> None:
    """All members compute at once; one after the other, written as plain layers, they give the same."""
    torch.manual_seed(0)
    depths = (1, 2, 3, 1, 2)
    together = Perceptrons(5, 4, depths).eval()
    for norm in together.norms:
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    numbers, order, place, scores = torch.randn(6, 5), sorted(depths, reverse=True), 0, []
    for depth in sorted(order):  # the shortest are read first
        member = [m for m, own in enumerate(order) if own == depth][[*sorted(order)[: len(scores)]].count(depth)]
        hidden = numbers
        for layer in range(depth):
            width = 8 if layer == 0 else 4
            plain = nn.Sequential(nn.Linear(hidden.shape[1], width), nn.BatchNorm1d(width), nn.ReLU()).eval()
            plain[0].weight.data, plain[0].bias.data = (
                together.weights[layer][member].T,
                together.biases[layer][member][0],
            )
            own = slice(member * width, (member + 1) * width)
            plain[1].running_mean, plain[1].running_var = (
                together.norms[layer].running_mean[own],
                together.norms[layer].running_var[own],
            )
            hidden = plain(hidden)
        scores.append(hidden @ together.last[place : place + hidden.shape[1]] + together.last_bias[len(scores)])
        place += hidden.shape[1]
    assert torch.allclose(torch.stack(scores).mean(0), together(numbers), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_job_gets_the_same_answer_alone_and_among_others(family: str) -> None:
    """The published code attends from job to job, and counts padding."""
    torch.manual_seed(0)
    network = build(ModelCard(family=family, estimator="transformer", bin=GIB, bins=9)).eval()
    kinds = ("linear", "dropout", "conv2d", "layer_norm", "relu")
    layers = tuple(SummaryLayer(kinds[place % 5], 50 * place, place) for place in range(200))
    runs = [ModelSummary(layers[: 17 * n], 1000 * n + 9, 8 + n, activation_function="relu") for n in range(1, 12)]
    together = probabilities(network, jobs_of(runs, family))
    for place, run in enumerate(runs):
        assert torch.allclose(probabilities(network, jobs_of([run], family))[0], together[place], atol=1e-5)
    assert jobs_of(runs, "mlp").tokens.shape[1] == LONGEST["mlp"], "longer sequences are cut off, as published"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("estimator", ["mlp", "transformer"])
def test_weights_have_a_card_and_were_judged_on_the_same_rows(family: str, estimator: str) -> None:
    _, first = load(shipped(family, "mlp", WIDTHS[family, "mlp"][0] * GIB))
    text = (SHIPPED / "gpumemnet.md").read_text()
    for width in WIDTHS[family, estimator]:
        file = shipped(family, estimator, width * GIB)
        network, card = load(file)
        assert (card.family, card.estimator, card.bin, card.gpu) == (family, estimator, width * GIB, "H200")
        assert sorted(card.test) == sorted(first.test) and card.rows == first.rows
        assert 0.2 < card.figures["test"]["accuracy"] <= 1 and len(card.figures["validation"]) in (0, 3)
        assert file.stat().st_size < 256 << 10 and file.name in text
        assert all(torch.isfinite(value).all() for value in network.state_dict().values())


def test_classes_are_those_of_the_paper_unless_others_are_named() -> None:
    e = find("gpumemnet").estimate(JobRequest(CNN), gpu("H200"))
    assert e.figure % (8 * GIB) == 0 and e.upper is None and e.figure_kind == "process"
    fine = find("gpumemnet").estimate(JobRequest(CNN, options={"bin": "1GiB"}), gpu("H200"))
    assert fine.figure % GIB == 0 and fine.figure < 8 * GIB
    with pytest.raises(InvalidValue, match="must be 1GiB or 8GiB for the family cnn, got '2GiB'"):
        find("gpumemnet").estimate(JobRequest(CNN, options={"bin": "2GiB"}), gpu("H200"))


def test_another_gpu_is_reported() -> None:
    e = find("gpumemnet").estimate(JobRequest(MLP), gpu("A100-40GB"))
    assert any("trained on an H200 alone" in note for note in e.notes)


def test_both_answer_for_real_models_by_name() -> None:
    pytest.importorskip("torchvision")
    for name in ("gpumemnet", "gpumemnet+transformer"):
        e = ullage.estimate("torchvision:resnet18", batch_size=16, estimator=name)
        assert e.estimator == name and e.figure % (8 * GIB) == 0


def test_a_function_missing_from_the_published_list_is_none() -> None:
    run = ModelSummary((SummaryLayer("conv2d", 4, 9),), 9, 1, activation_function="hardswish")
    assert totals_of(run, "cnn")[-2:] == [0.0, 0.0] and len(names_of("cnn")) == len(totals_of(run, "cnn"))
