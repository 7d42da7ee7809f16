"""A card of one's own from a TOML file, and one clear error for every mistake in it."""

from pathlib import Path

import pytest

from ullage.errors import InvalidValue
from ullage.hardware import gpu
from ullage.hardware.catalogue import derived_usable

GIB, MIB = 1024**3, 1024**2


@pytest.fixture
def card_file(tmp_path: Path) -> Path:
    return tmp_path / "mycard.toml"


def test_inherited_and_overridden(card_file: Path) -> None:
    keys = ['base = "a100_40gb"', 'name = "half-a100"', 'memory = "20GiB"', "sms = 54", "bandwidth = 777"]
    card_file.write_text("\n".join(keys))
    card, base = gpu(str(card_file)), gpu("A100-40GB")
    assert (card.name, card.memory, card.sms, card.bandwidth) == ("half-a100", 20 * GIB, 54, 777.0)
    assert card.fp16_tflops == base.fp16_tflops and card.context == base.context
    assert card.usable == derived_usable(20 * GIB, (8, 0))[0]
    assert card.usable_source.startswith("derived")
    assert str(card_file) in card.source and "A100-40GB" in card.source
    assert gpu(card_file) == card


def test_usable_memory_stays_unless_memory_changes(card_file: Path) -> None:
    card_file.write_text('base = "H200"\nsms = 100\n')
    assert gpu(card_file).usable == gpu("H200").usable
    card_file.write_text('base = "H200"\nusable_mib = 100000\n')
    assert gpu(card_file).usable == 100000 * MIB and not gpu(card_file).usable_source.startswith("derived")


def test_an_own_context_is_not_called_measured(card_file: Path) -> None:
    card_file.write_text('base = "H200"\ncontext_mib = 500\n')
    card = gpu(card_file)
    assert (card.context, card.context_upper, card.context_measured) == (500 * MIB, None, False)
    assert card.context_source == str(card_file)


def test_without_a_base_the_generation_fills_in(card_file: Path) -> None:
    card_file.write_text('memory_mib = 24000\ncompute_capability = "8.6"\n')
    card = gpu(card_file)
    assert (card.name, card.generation, card.max_threads_per_sm) == ("mycard", "ampere", 1536)
    assert card.context == 550 * 1024**2, "that of a large card, since its SMs are not known"
    assert card.sms is None and card.bandwidth is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base = ", "must be valid TOML"),
        ('base = "A100-40"', "base: no GPU named 'A100-40'; did you mean 'A100-40GB'"),
        ('base = "a100"', "can be any of"),
        ("base = 7", "base must be the name of a GPU"),
        ('base = "H200"\nmemroy = "20GiB"', "unknown key 'memroy'; known keys: base, "),
        ('base = "H200"\nmemory = "much"', "memory must be bytes or a size such as '24GiB', got 'much'"),
        ('base = "H200"\nmemory = 1.5', "memory must be bytes"),
        ('base = "H200"\nmemory = 0', "memory must be a size above 0"),
        ('base = "H200"\nmemory_mib = true', "memory_mib must be a whole number above 0, got True"),
        ('base = "H200"\nmemory = "1GiB"\nmemory_mib = 1024', "memory is given twice"),
        ('base = "H200"\nusable = "200GiB"', "usable must be at most memory"),
        ('base = "H200"\nsms = "many"', "sms must be a whole number"),
        ('base = "H200"\nbandwidth = 0', "bandwidth must be a number above 0"),
        ('base = "H200"\ncompute_capability = 9.0', "compute_capability must be text such as '8.6'"),
        ('base = "H200"\ncontext_measured = 1', "context_measured must be true or false"),
        ('base = "H200"\naliases = "x"', "aliases must be a list of texts"),
        ('base = "H200"\nname = 7', "name must be text"),
        ('base = "H200"\n[memory]\nmib = 7', "memory must be bytes"),
        ('memory = "20GiB"', "has neither compute_capability nor base"),
        ('compute_capability = "8.0"', "has neither memory nor base"),
    ],
)
def test_a_mistake_is_reported_with_its_file(card_file: Path, text: str, said: str) -> None:
    card_file.write_text(text)
    with pytest.raises(InvalidValue) as error:
        gpu(str(card_file))
    assert str(card_file) in str(error.value) and said in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name, said in (("none", "No such file"), ("folder", "Is a directory"), ("binary", "not UTF-8")):
        with pytest.raises(InvalidValue, match=said):
            gpu(tmp_path / f"{name}.toml")
