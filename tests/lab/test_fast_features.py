"""Features of a run: by hand for small networks, and for real models of every source."""

import gc

import pytest
import torch
from torch import nn

from ullage.errors import InvalidValue
from ullage.jobs import Model
from ullage_lab.draw.generated import generate
from ullage_lab.estimators.fast.estimator import WORKSPACES, closed_bytes, parts_of
from ullage_lab.estimators.fast.features import features
from ullage_lab.estimators.fast.rows import from_features, row_of


class Twice(nn.Module):
    """One layer used twice, and a tuple as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.layer(torch.relu(self.layer(states))), None


class Peeking(nn.Module):
    """A model that looks at a value, which the meta device does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(states)
        return out * 2 if out.sum().item() > 1e9 else out


def own(name: str, **more: object) -> Model:
    return Model(f"{__file__}:{name}", batch_size=4, input_shape=[6], optimizer="sgd", **more)  # type: ignore[arg-type]


def test_a_perceptron_by_hand() -> None:
    found = features(
        Model("mlp:x", settings={"widths": [8, 16, 4], "drop": True, "bn": True}, batch_size=32, optimizer="adam")
    )
    assert found.layers == (
        ("linear", 16, 144),
        ("batch_norm", 16, 32),
        ("relu", 16, 0),
        ("dropout", 16, 0),
        ("linear", 4, 68),
    )
    assert (found.parameters, found.activations, found.depth, found.input_elements) == (244, 68, 2, 8)
    assert found.activation_function == "relu" and found.sequence_length is None
    # input 8, into the norm 16, out of relu 16, out of dropout 16, scores 4 and their logarithms 4; norm: 2 x 16 in all
    assert found.kept_numbers == 8 + 16 + 16 + 16 + 4 + 4 + 1
    assert found.kept_bytes == 16 + 8  # mask, target


def test_a_layer_used_twice_counts_its_parameters_once() -> None:
    found = features(own("Twice"))
    assert found.layers == (("linear", 6, 42), ("linear", 6, 0))
    assert found.parameters == 42


def test_a_model_that_looks_at_values_runs_on_a_virtual_gpu() -> None:
    assert features(own("Peeking")).layers == (("linear", 6, 42),)


def test_a_wrong_shape_is_an_error_of_ours() -> None:
    with pytest.raises(InvalidValue, match="Twice does not run: RuntimeError: "):
        features(Model(f"{__file__}:Twice", batch_size=4, input_shape=[7], optimizer="sgd"))
    with pytest.raises(InvalidValue, match="shape of its input"):
        features(Model(f"{__file__}:Twice", batch_size=4))


def test_eager_attention_keeps_scores_and_fused_attention_none() -> None:
    row = {
        "model": "ullage_lab.networks.generated:transformer",
        "batch": 2,
        "seq": 64,
        "classes": 4,
        "opt": "adam",
        "settings": {
            "kind": "decoder",
            "vocabulary": 50,
            "length": 64,
            "size": 16,
            "layers": 2,
            "heads": 4,
            "middle": 32,
            "dropout": 0.0,
        },
    }
    fused = features(Model.from_row(row))
    row["settings"]["eager"] = True  # type: ignore[index]
    eager = features(Model.from_row(row))
    assert fused.counts["attention"] == eager.counts["attention"] == 2
    scores = 2 * 4 * 64 * 64
    assert eager.kept_numbers - fused.kept_numbers == scores - 2 * 4 * 64  # the kernels keep one number a row
    assert fused.sequence_length == 64 and fused.counts["layer_norm"] == 5 and fused.counts["embedding"] == 1


def test_gpt2_projections_are_counted_as_such() -> None:
    row = next(row for row in generate("transformer", 50, 0) if row["settings"]["conv1d"])
    found = features(Model.from_row(row))
    assert found.counts["conv1d"] > 0 and found.counts["linear"] == 1


@pytest.mark.parametrize("family", ("mlp", "cnn", "transformer"))
def test_count_of_the_drawing_agrees_with_the_closed_formula(family: str) -> None:
    for row in list(generate(family, 6, 11)):
        found = features(Model.from_row(row))
        assert found.parameters == row["parameters"]
        assert 0.8 < row["need"] / (closed_bytes(parts_of(from_features(found))) - WORKSPACES) < 1.5


def test_optimizer_and_precision_move_the_parts_as_they_should() -> None:
    parts = {
        (opt, precision): parts_of(
            row_of(Model("mlp:x", settings={"widths": [64, 64]}, batch_size=8, optimizer=opt, precision=precision))
        )
        for opt in ("sgd", "sgdm", "adam")
        for precision in ("fp32", "amp_bf16", "bf16")
    }
    weights = 4 * (64 * 64 + 64)
    assert [parts[opt, "fp32"]["state"] for opt in ("sgd", "sgdm", "adam")] == [0, weights, 2 * weights]
    assert parts["adam", "bf16"]["weights"] == weights // 2 and parts["adam", "bf16"]["state"] == weights
    assert parts["adam", "amp_bf16"]["weights"] == weights * 3 // 2
    assert parts["sgd", "bf16"]["kept"] < parts["sgd", "fp32"]["kept"]


@pytest.mark.parametrize(
    ("configuration", "counts"),
    [
        ({"name": "tv:resnet18", "batch_size": 2}, {"conv2d": 20, "batch_norm": 20, "linear": 1}),
        ({"name": "tv:vit_b_16", "batch_size": 2}, {"attention": 12, "layer_norm": 25}),
        ({"name": "timm:efficientnet_b0", "batch_size": 2}, {"batch_norm": 49, "conv2d": 81}),
        ({"name": "hf:GPT2LMHeadModel", "batch_size": 2, "sequence_length": 32}, {"conv1d": 48, "attention": 12}),
        ({"name": "hf:BertForMaskedLM", "batch_size": 2, "sequence_length": 32}, {"linear": 74, "attention": 12}),
    ],
)
def test_real_models(configuration: dict[str, object], counts: dict[str, int]) -> None:
    source = str(configuration["name"]).partition(":")[0]
    pytest.importorskip({"tv": "torchvision", "timm": "timm", "hf": "transformers"}[source])
    found = features(Model(optimizer="sgd", **configuration))  # type: ignore[arg-type]
    assert {kind: found.counts[kind] for kind in counts} == counts
    assert sum(own for _, _, own in found.layers) >= 0.9 * found.parameters


def test_nothing_of_a_model_stays_behind() -> None:
    configuration = Model("mlp:x", settings={"widths": [8, 4, 2]}, batch_size=16)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    features(configuration)
    before = tensors()
    features(configuration)
    assert tensors() == before
