"""The example scripts run on the virtual GPU as they stand."""

import importlib.util
import re

import pytest
from tests.paths import ROOT
from tests.scripts import estimate_script

from ullage.jobs.ranks import Rank

FOLDER = ROOT / "examples" / "scripts"
NEEDS = {
    "accelerate_loop": "accelerate",
    "hf_trainer": "accelerate",
    "lightning_module": "lightning",
    "peft_lora": "peft",
}
QUICK = {
    "sgd_by_hand": ("--width", "64"),
    "graph_network": ("--width", "16"),
    "gan_two_optimizers": ("--features", "8"),
    "rnn_language_model": ("--hidden", "32"),
}


@pytest.mark.parametrize("name", QUICK)
def test_small_examples_settle(estimated, name):
    values = estimated((FOLDER / f"{name}.py").read_text(), "--batch-size", "4", *QUICK[name])
    assert values["steps"] >= 3 and not any("before the requests" in note for note in values["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_takes_between_a_third_of_a_gibibyte_and_ten(path, tmp_path, monkeypatch):
    package = NEEDS.get(path.stem)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    launched = re.search(r"--nproc-per-node (\d+)", path.read_text())  # by torchrun, as its first line says
    rank = Rank(int(launched[1])) if launched else None
    estimate = estimate_script(path, gpu="H200", rank=rank)
    assert 0.3 < estimate.peak_reserved / 2**30 < 10
    assert estimate.steps >= 3 and estimate.phases["training"]
    assert not any(tmp_path.iterdir())
