"""The networks: bins that have an order, attention within a job, padding without effect, and that they learn."""

import math
import resource

import numpy as np
import pytest
import torch
from tests.lab.synthetic import rows

from ullage.errors import InvalidValue
from ullage_lab.estimators.walknet.inputs import PARTS, TOTALS, family_of, folded, inputs_of
from ullage_lab.estimators.walknet.networks import (
    Belief,
    Bins,
    ModelCard,
    batched,
    build,
    cross_entropy,
    load,
    probabilities,
    save,
)
from ullage_lab.train.fitting import Schedule
from ullage_lab.train.protocol import examples_of, train

CARDS = [ModelCard(family="mlp", estimator=name, bin=1 << 30, bins=40) for name in ("mlp", "transformer")]


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["mlp", "transformer"])
def test_training_learns(estimator: str) -> None:
    """Memory is 1.1 times the walk: a network that did not learn would be a tenth off."""
    result = train(examples_of(rows(240)), family="mlp", estimator=estimator, bin=1 << 30, schedule=Schedule(epochs=25))
    assert result.test.accuracy >= 0.8 and result.test.rows == 72
    assert np.mean([one.accuracy for one in result.validation]) >= 0.75


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.estimator)
def test_a_job_gets_the_same_answer_alone_and_among_others(card: ModelCard) -> None:
    """Attention across a batch, or padding that counts, would change it."""
    torch.manual_seed(0)
    network = build(card).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    jobs = [inputs_of(row) for row in rows(12)]
    together = probabilities(network, batched(jobs))
    for place, job in enumerate(jobs):
        assert torch.allclose(probabilities(network, batched([job]))[0], together[place], atol=1e-5)


def test_probabilities_sum_to_one_and_follow_the_place() -> None:
    bins = Bins(64, 1 << 30)
    for gib in (0.5, 7.5, 40.5, 200.0):
        place = torch.full((1, 2), math.log(gib * 2**30))
        found = bins(Belief(place, torch.full((1, 2), 1e-3), torch.full((1, 2), math.log(0.5))))
        assert found.exp().sum().item() == pytest.approx(1, abs=1e-3)
        assert found.argmax().item() == min(int(gib), 63)


def test_cross_entropy_is_that_of_the_scores() -> None:
    torch.manual_seed(0)
    belief = Belief(torch.randn(5, 2) * 0.2 + math.log(8 * 2**30), torch.full((5, 2), 0.1), torch.full((5, 2), -0.6931))
    true = torch.arange(5) + 5
    edges = torch.stack([true * 2.0**30, (true + 1) * 2.0**30]).log()
    expected = torch.nn.functional.nll_loss(Bins(64, 1 << 30)(belief), true)
    assert cross_entropy(belief, *edges).item() == pytest.approx(expected.item(), rel=1e-4)


def test_equal_layers_count_as_often_as_they_occur() -> None:
    block = [
        {"type": "linear", "activations": 8, "parameters": 72},
        {"type": "gelu", "activations": 8, "parameters": 0},
    ]
    found = folded(block * 3)
    assert [layer[:4] for layer in found] == [("linear", 8, 72, 3), ("gelu", 8, 0, 3)]
    assert found[0][4:] == (0.0, 0.8)


def test_inputs_have_their_names() -> None:
    made = inputs_of(rows(1)[0])
    assert made.totals.shape == (len(TOTALS),) and made.parts.shape == (len(PARTS),)
    assert np.isfinite(made.totals).all() and (made.parts >= 0).all()


@pytest.mark.parametrize(
    ("kinds", "family"),
    [
        (["linear", "relu", "batch_norm"], "mlp"),
        (["conv2d", "batch_norm", "relu", "linear"], "cnn"),
        (["embedding", "layer_norm", "linear", "attention"], "transformer"),
        (["conv2d", "layer_norm", "layer_norm", "linear"], "transformer"),
    ],
)
def test_the_family_is_told_from_the_layers(kinds: list[str], family: str) -> None:
    assert family_of({"layers": [{"type": kind, "activations": 9, "parameters": 1} for kind in kinds]}) == family


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.estimator)
def test_weights_come_back_as_they_were(card: ModelCard, tmp_path) -> None:
    network, file = build(card).eval(), tmp_path / "w.safetensors"
    save(network, card, file)
    again, told = load(file)
    jobs = batched([inputs_of(row) for row in rows(3)])
    assert told == card and torch.equal(probabilities(network, jobs), probabilities(again, jobs))


@pytest.mark.parametrize("content", [b"", b"no weights", b"\x10\x00\x00\x00\x00\x00\x00\x00{broken"])
def test_a_broken_file_is_one_clear_message(content: bytes, tmp_path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(content)
    with pytest.raises(InvalidValue, match="needed weights of walknet in .* 'ullage lab train walknet"):
        load(file)


def test_weights_can_be_read_by_others_as_far_as_the_umask_allows(tmp_path) -> None:
    save(build(CARDS[0]), CARDS[0], tmp_path / "one.safetensors")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "one.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_full_disk_is_one_clear_message_and_leaves_the_old_weights(tmp_path) -> None:
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
    from ullage_lab.estimators.walknet import networks

    file = tmp_path / "w.safetensors"
    save(build(CARDS[0]), CARDS[0], file)
    monkeypatch.setattr(networks, "TOTALS", networks.TOTALS[:-1])
    with pytest.raises(InvalidValue, match="another version"):
        load(file)


def test_a_cut_file_is_refused(tmp_path) -> None:
    file = tmp_path / "w.safetensors"
    save(build(CARDS[0]), CARDS[0], file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(InvalidValue, match="needed weights"):
        load(file)
