"""Files of weights: they come back as they were, and one that is not whole is refused in one line."""

import resource

import pytest
import torch
from tests.lab.synthetic import rows

from ullage.errors import InvalidValue
from ullage.estimation.estimators.gpumemnet import networks
from ullage.estimation.estimators.gpumemnet.networks import build, load
from ullage.estimation.estimators.weights import ModelCard, probabilities
from ullage_lab.estimators.weights import save_network as save
from ullage_lab.train.protocol import examples_of

CARDS = [ModelCard(family="mlp", estimator=name, bin=1 << 30, bins=40) for name in ("mlp", "transformer")]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.estimator)
def test_weights_come_back_as_they_were(card: ModelCard, tmp_path) -> None:
    network, file = build(card).eval(), tmp_path / "w.safetensors"
    save(network, card, file)
    again, told = load(file)
    jobs = examples_of(rows(3)).jobs
    assert told == card and torch.equal(probabilities(network, jobs), probabilities(again, jobs))


@pytest.mark.parametrize("content", [b"", b"no weights", b"\x10\x00\x00\x00\x00\x00\x00\x00{broken"])
def test_a_broken_file_is_one_clear_message(content: bytes, tmp_path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(content)
    with pytest.raises(InvalidValue, match="must have weights of gpumemnet: .* 'ullage lab train gpumemnet"):
        load(file)


def test_weights_are_readable_by_others_as_the_umask_allows(tmp_path) -> None:
    save(build(CARDS[0]), CARDS[0], tmp_path / "one.safetensors")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "one.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_full_disk_is_one_message_and_keeps_the_old_weights(tmp_path) -> None:
    file, limits = tmp_path / "w.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    save(build(CARDS[0]), CARDS[0], file)
    before = file.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(InvalidValue, match="cannot write the weights to .*: File too large"):
            save(build(CARDS[0]), CARDS[0], file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_weights_of_another_version_are_refused(tmp_path, monkeypatch) -> None:
    file = tmp_path / "w.safetensors"
    save(build(CARDS[0]), CARDS[0], file)
    monkeypatch.setattr(networks, "names_of", lambda family: ["another"])
    with pytest.raises(InvalidValue, match="another version"):
        load(file)


def test_a_cut_file_is_refused(tmp_path) -> None:
    file = tmp_path / "w.safetensors"
    save(build(CARDS[0]), CARDS[0], file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(InvalidValue, match="must have weights"):
        load(file)
