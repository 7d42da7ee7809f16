"""Finding a GPU by the names people write, and what is said when there is none."""

from operator import attrgetter
from pathlib import Path

import pytest
from tests.loops import for_each

from ullage.errors import InvalidValue, UnknownName
from ullage.hardware import GPU, generation_of, gpu, gpu_list, gpus


@for_each(gpus(), name=attrgetter("name"))
def test_every_name_finds_its_own_gpu(card: GPU) -> None:
    for written in (card.name, card.name.lower(), card.name.replace("-", "_"), card.name.replace("-", " ")):
        assert gpu(written) is card
    for alias in card.aliases:
        assert gpu(alias) is card


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("4090", "RTX-4090"),
        ("RTX4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("3060", "RTX-3060-12GB"),
        ("rtx 3060 ti", "RTX-3060-Ti"),
        ("2080ti", "RTX-2080-Ti"),
        ("a6000", "RTX-A6000"),
        ("L40-S", "L40S"),
        ("h200", "H200"),
        ("gh200", "GH200-96GB"),
        ("h100", "H100-80GB"),
        ("h100-nvl", "H100-NVL-94GB"),
        ("H100 SXM5", "H100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100-40GB-MIG-1g.5gb"),
        ("a100-40gb 3g.20gb", "A100-40GB-MIG-3g.20gb"),
        ("h200 mig 1g.18gb", "H200-MIG-1g.18gb"),
    ],
)
def test_other_ways_to_write_a_name(written: str, name: str) -> None:
    assert gpu(written).name == name


def test_a_gpu_is_returned_as_it_is() -> None:
    assert gpu(gpu("T4")) is gpu("T4")


@pytest.mark.parametrize(
    ("written", "meanings"),
    [
        ("a100", ["A100-40GB", "A100-80GB", "A100-PCIe-40GB", "A100-PCIe-80GB"]),
        ("V100", ["V100-16GB", "V100-32GB"]),
        ("4060 ti", ["RTX-4060-Ti-8GB", "RTX-4060-Ti-16GB"]),
        ("A100-MIG-1g.10gb", ["A100-40GB-MIG-1g.10gb", "A100-80GB-MIG-1g.10gb"]),
    ],
)
def test_a_name_that_fits_several_gpus_lists_them(written: str, meanings: list[str]) -> None:
    with pytest.raises(UnknownName) as error:
        gpu(written)
    assert all(name in str(error.value) for name in meanings)


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("H20O", "H200"),
        ("rtx-4099", "RTX-4090"),
        ("A100-40", "A100-40GB"),
        ("A100-40GB-MIG-3g.21gb", "A100-40GB-MIG-3g.20gb"),
    ],
)
def test_a_misspelling_names_near_ones(written: str, near: str) -> None:
    with pytest.raises(UnknownName) as error:
        gpu(written)
    assert near in error.value.near


def test_the_advice_for_a_card_has_no_mig_instances() -> None:
    with pytest.raises(UnknownName) as error:
        gpu("A100-41GB")
    assert error.value.near and not any("MIG" in name for name in error.value.near)


def test_something_else_than_a_name() -> None:
    with pytest.raises(InvalidValue, match="a GPU must be a name"):
        gpu(4090)  # type: ignore[arg-type]


def test_several_gpus() -> None:
    assert [card.name for card in gpu_list("4xA100-40GB")] == ["A100-40GB"] * 4
    assert [card.name for card in gpu_list("2x4090, 1 x h200,T4")] == ["RTX-4090", "RTX-4090", "H200", "T4"]
    assert [card.name for card in gpu_list("2xA30-MIG-1g.6gb")] == ["A30-MIG-1g.6gb"] * 2


@pytest.mark.parametrize("text", ["", "0xH200", "H200,", " , "])
def test_a_list_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidValue, match="4xA100-40GB"):
        gpu_list(text)


def test_a_list_with_an_unknown_gpu() -> None:
    with pytest.raises(UnknownName):
        gpu_list("2xH2000000")


def test_generations() -> None:
    capabilities = [(6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (3, 5)]
    assert [generation_of(capability) for capability in capabilities] == [
        "pascal",
        "volta",
        "turing",
        "ampere",
        "ampere",
        "ada",
        "hopper",
        "blackwell",
        "blackwell",
        None,
    ]


def test_own_card_lists(tmp_path: Path) -> None:
    (tmp_path / "half.toml").write_text('base = "H200"\nmemory = "70GiB"\n')
    assert [card.name for card in gpu_list(f"2x{tmp_path}/half.toml")] == ["half", "half"]
