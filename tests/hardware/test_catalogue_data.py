"""The figures in catalogue.toml: complete where they must be, plausible, and agreeing with one another."""

import re
from operator import attrgetter

import pytest
from tests.loops import for_each

from ullage.hardware import GPU, gpu, gpus
from ullage.hardware.catalogue import bare_context, catalogue_tables, derived_usable

GIB, MIB = 1024**3, 1024**2
CARDS = [card for card in gpus() if not card.is_mig]
INSTANCES = [card for card in gpus() if card.is_mig]
every_gpu = for_each(gpus(), name=attrgetter("name"))
every_instance = for_each(INSTANCES, name=attrgetter("name"))
FIGURES = ["memory", "usable", "sms", "bandwidth", "fp32_tflops", "tf32_tflops", "fp16_tflops", "bf16_tflops"]
FIGURES += ["l2_mib", "shared_memory_per_sm_kib", "max_threads_per_sm"]
FIGURES += ["context", "context_bare", "context_upper"]


def test_enough_gpus_of_every_kind() -> None:
    assert len(CARDS) >= 45
    assert {card.family for card in CARDS} == {"data centre", "workstation", "consumer"}
    assert {card.parent for card in INSTANCES} == {"A30", "A100-40GB", "A100-80GB", "H100-80GB", "H200"}
    generations = {"pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"}
    assert {card.generation for card in CARDS} == generations == set(catalogue_tables()["generation"])


@every_gpu
def test_sources_are_given(card: GPU) -> None:
    assert card.source and card.usable_source and card.context_source
    assert card.device_name and card.compute_capability


@every_gpu
def test_unknown_is_none_and_never_zero(card: GPU) -> None:
    assert all(getattr(card, figure) is None or getattr(card, figure) > 0 for figure in FIGURES)


@every_gpu
def test_memory_is_about_what_the_name_says(card: GPU) -> None:
    stated = re.findall(r"([0-9]+)gb", " ".join([card.name, *card.aliases]).lower())
    for number in stated[-1:]:
        # Makers count some memories in GB and some in GiB; MIG profiles in both.
        assert min(abs(card.memory / unit - int(number)) / int(number) for unit in (GIB, 1e9)) < 0.10


@every_gpu
def test_usable_memory_is_a_little_less_than_all(card: GPU) -> None:
    assert 0.93 * card.memory < card.usable <= card.memory
    assert card.is_mig or card.usable < card.memory


@for_each([card for card in CARDS if not card.usable_source.startswith("derived")], name=attrgetter("name"))
def test_the_derivation_fits_what_is_published(card: GPU) -> None:
    assert abs(derived_usable(card.memory, card.compute_capability)[0] - card.usable) < 0.01 * card.memory


@every_gpu
def test_the_compute_capability_is_one_of_the_tables(card: GPU) -> None:
    assert card.compute_capability is not None
    assert "{}.{}".format(*card.compute_capability) in catalogue_tables()["capability"]
    assert card.shared_memory_per_sm_kib and card.max_threads_per_sm


@every_gpu
def test_rates_are_in_proportion(card: GPU) -> None:
    for slower, faster in (("fp32_tflops", "fp16_tflops"), ("tf32_tflops", "bf16_tflops")):
        slow, fast = getattr(card, slower), getattr(card, faster)
        assert slow is None or fast is None or 1.5 * slow < fast
    if card.bf16_tflops is not None or card.tf32_tflops is not None:
        assert card.generation not in ("pascal", "volta", "turing")
    if card.bf16_tflops is not None:
        assert card.bf16_tflops == card.fp16_tflops


@for_each([card for card in CARDS if card.sms and card.fp32_tflops], name=attrgetter("name"))
def test_fp32_rate_needs_a_clock_that_exists(card: GPU) -> None:
    assert card.sms and card.fp32_tflops
    lanes = 64 if card.compute_capability in ((6, 0), (7, 0), (7, 5), (8, 0)) else 128
    assert 1.0 < card.fp32_tflops * 1e3 / (2 * lanes * card.sms) < 2.9  # GHz


@every_gpu
def test_the_context_is_ordered(card: GPU) -> None:
    assert card.context is not None and card.context_upper is not None
    assert 20 * MIB <= (card.context_bare or card.context) <= card.context <= card.context_upper <= 1000 * MIB


def test_only_the_h200_context_was_measured() -> None:
    assert [card.name for card in gpus() if card.context_measured] == ["H200"]
    h200 = gpu("H200")
    assert h200.context_bare == 612 * MIB
    assert h200.context is not None and 742 * MIB <= h200.context <= 762 * MIB


def test_device_names_tell_cards_apart_by_memory() -> None:
    seen = [(card.device_name, card.memory) for card in gpus()]
    assert len(set(seen)) == len(seen)


@every_instance
def test_an_instance_is_less_than_its_card(card: GPU) -> None:
    assert card.parent and card.mig_instances and card.sms
    parent = gpu(card.parent)
    assert card.memory < parent.memory and card.mig_instances * card.memory < parent.memory
    assert parent.sms and card.mig_instances * card.sms <= parent.sms
    assert parent.bandwidth and card.bandwidth and card.bandwidth <= parent.bandwidth
    assert card.generation == parent.generation
    assert card.device_name.startswith(parent.device_name + " MIG ")


@every_instance
def test_an_instance_has_the_slices_of_its_name(card: GPU) -> None:
    profile = re.fullmatch(r".*-MIG-([1-7])g\.([0-9]+)gb", card.name)
    assert profile and card.sms and card.parent
    single = min(other.sms for other in INSTANCES if other.parent == card.parent and other.sms)
    assert card.sms >= int(profile[1]) * single


def published_contexts():
    for row in catalogue_tables()["context"]:
        card = gpu(row["gpu"]) if "gpu" in row else None
        sms, threads = (card.sms, card.max_threads_per_sm) if card else (row["sms"], row["max_threads_per_sm"])
        yield pytest.param(sms, threads, row["bare_mib"], row["source"], id=row["source"][:60])


@pytest.mark.parametrize(("sms", "threads", "measured", "source"), list(published_contexts()))
def test_a_bare_context_is_local_memory_for_all_threads(sms, threads, measured, source):
    assert abs(bare_context(sms, threads) / MIB - measured) <= 10
    assert source.startswith(("https://", "measured"))


def test_contexts_grow_with_the_card_and_are_marked_unmeasured():
    cards = [gpu(name) for name in ("T4", "L4", "RTX-3090", "RTX-4090", "A100-40GB", "H200", "B200")]
    contexts = [card.context for card in cards]
    assert contexts == sorted(contexts)
    for card in cards:
        assert card.context_bare < card.context < card.context_upper
        assert card.context_measured is (card.name == "H200")
        assert card.context_measured or "not measured on this card" in card.context_source
    assert gpu("A100-40GB").context_upper > 700 * MIB, "CARMA's runs on an A100 are not below what they took"
