"""LLMem's formulas, counted by hand, and what it does not support."""

import pytest

import ullage
from ullage.errors import InvalidValue
from ullage.estimation.estimators.registry import find
from ullage.hardware import gpu
from ullage.jobs import Model
from ullage.jobs.job import JobRequest
from ullage_lab.estimators import llmem

PAGE = 2 << 20
SIZES = (50_272 * 768, 768 * 768, 768)
OPT = llmem.Decoder(weights=SIZES, layers=12, hidden=768, vocabulary=50_272)


def whole(size: float) -> int:
    return -(-int(size) // PAGE) * PAGE


def test_one_gpu_by_hand() -> None:
    parts = llmem.parts_of(OPT, batch=4, length=512)
    assert parts["parameters"] == sum(whole(2 * size) for size in SIZES)  # gradients take the weights' place
    assert parts["optimizer"] == sum(3 * whole(4 * size) for size in SIZES)
    layers = 14 * whole(2 * 4 * 512 * 768)
    head = whole(2 * 4 * 512 * 50_272) + 2 * whole(2 * 4 * 511 * 50_272)
    assert parts["activations"] == whole(8 * 4 * 512) + layers + head


def test_data_parallel_gathers_weights_and_spreads_optimizer() -> None:
    one, four = llmem.parts_of(OPT, 4, 512), llmem.parts_of(OPT, 4, 512, dp=4)
    assert one["parameters"] <= four["parameters"] <= one["parameters"] + PAGE * len(SIZES)
    assert four["optimizer"] == sum(3 * whole(size) for size in SIZES)
    assert four["activations"] == one["activations"]


def test_tensor_parallel_splits_the_weights_and_gathers_outputs() -> None:
    one, two = llmem.parts_of(OPT, 4, 512), llmem.parts_of(OPT, 4, 512, tp=2)
    assert two["parameters"] == sum(whole(size) for size in SIZES)
    assert two["activations"] - one["activations"] == 12 * whole(4 * 512 * 768)


def test_both_together_take_less_than_either() -> None:
    both = llmem.parts_of(OPT, 4, 512, dp=2, tp=2)
    assert both["parameters"] < llmem.parts_of(OPT, 4, 512, dp=4)["parameters"]
    assert both["optimizer"] == llmem.parts_of(OPT, 4, 512, dp=4)["optimizer"]
    assert both["optimizer"] < llmem.parts_of(OPT, 4, 512, tp=2)["optimizer"]


def test_a_head_in_32_bits_doubles_its_part() -> None:
    low, high = (llmem.parts_of(OPT, 4, 512, head_in_32_bits=flag)["activations"] for flag in (False, True))
    assert 2 * 4 * 512 * 50_272 * 2.9 < high - low < 2 * 4 * 512 * 50_272 * 3.1


def test_a_model_by_its_name() -> None:
    pytest.importorskip("transformers")
    model = ullage.Model(
        "hf:GPT2LMHeadModel",
        batch_size=2,
        sequence_length=64,
        precision="amp_bf16",
        checkpointing=True,
        settings={"n_layer": 2, "n_embd": 64, "n_head": 2, "llmem.dp": 2},
    )
    found = ullage.estimate(model, gpu="H200", estimator="llmem")
    assert found.figure_kind == "process" and found.peak_allocated is None
    assert found.breakdown["context"] == gpu("H200").context


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "torchvision:resnet18"}, "decoder language models"),
        ({"name": "hf:BertForMaskedLM"}, "not BertForMaskedLM"),
        ({"optimizer": "sgd"}, "made for Adam"),
        ({"precision": "fp32"}, "16-bit"),
        ({"checkpointing": False}, "checkpointing"),
        ({"lora": 8}, "all weights"),
    ],
)
def test_unsupported_options_give_a_reason(options: dict[str, object], reason: str) -> None:
    values = {"name": "hf:GPT2LMHeadModel", "batch_size": 2, "precision": "amp_bf16", "checkpointing": True} | options
    answer = find("llmem").supports(JobRequest(Model(**values)))  # type: ignore[arg-type]
    assert answer is not None and reason in answer


def test_no_gpu_at_all_is_refused() -> None:
    with pytest.raises(InvalidValue, match="dp and tp must be at least 1"):
        llmem.parts_of(OPT, 4, 512, dp=0)
