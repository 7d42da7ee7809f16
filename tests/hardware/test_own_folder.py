"""GPUs of one's own by name, the local one, and what `ullage gpus` shows."""

import json

import pytest
from typer.testing import CliRunner

import ullage.hardware.lookup as lookup
from ullage.cli import app
from ullage.errors import InvalidValue, UnknownName
from ullage.hardware import gpu, own_gpus, select_gpus
from ullage.home import home


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path))
    (tmp_path / "gpus").mkdir()
    return tmp_path / "gpus"


def shown(*words):
    return CliRunner().invoke(app, ["gpus", *words])


def test_a_file_in_the_folder_is_found_by_its_name(folder):
    (folder / "Half-A100.toml").write_text('base = "A100-40GB"\nmemory = "20GiB"\n')
    assert gpu("half-a100").memory == 20 * 2**30 and gpu("Half-A100") == own_gpus()[0]
    assert "Half-A100" in {card.name for card in select_gpus("all")}
    assert "Half-A100" in shown("half").stdout and "20.0 GiB" in shown("Half-A100").stdout


def test_a_broken_file_is_named_and_hides_no_other_gpu(folder):
    (folder / "broken.toml").write_text("memory = ")
    assert gpu("H200").name == "H200"
    with pytest.raises(InvalidValue, match=r"broken\.toml must be valid TOML"):
        gpu("broken")
    with pytest.raises(InvalidValue, match=r"broken\.toml"):
        own_gpus()
    (folder / "broken.toml").write_text("sms = 10\n")
    with pytest.raises(InvalidValue, match=r"broken\.toml has neither memory nor base"):
        gpu("broken")


def test_without_a_folder_nothing_is_missed(tmp_path, monkeypatch):
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "none"))
    assert own_gpus() == ()
    with pytest.raises(UnknownName, match="did you mean"):
        gpu("H20O")
    monkeypatch.delenv("ULLAGE_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", "/srv/state")
    assert str(home()) == "/srv/state/ullage"


def test_the_local_gpu(monkeypatch):
    monkeypatch.setattr(lookup, "local_gpus", lambda: [gpu("H200"), gpu("T4")])
    assert [gpu(name).name for name in ("local", "Local:0", "local:1")] == ["H200", "H200", "T4"]
    with pytest.raises(InvalidValue, match="this machine has no GPU 2; NVML finds 2"):
        gpu("local:2")
    monkeypatch.setattr(lookup, "local_gpus", list)
    with pytest.raises(InvalidValue, match="NVML finds none.*pip install nvidia-ml-py"):
        gpu("local")


def test_one_card_in_full_and_the_columns():
    text = shown("A100-40GB").stdout
    for words in ("bandwidth, GB/s", "1,555", "BF16", "8.0", "source", "datasheet", "CUDA context"):
        assert words in text
    table = shown("a100").stdout
    assert "GB/s" in table and "A100-40GB-MIG-3g.20gb" in table and "A100-80GB" in table
    assert "H200" in shown("hopper").stdout and "T4" not in shown("hopper").stdout
    assert [card["name"] for card in json.loads(shown("A100-40GB", "--json").stdout)] == ["A100-40GB"]
    assert "slice of" in shown("A100-40GB-MIG-3g.20gb").stdout and "slice of" not in text
