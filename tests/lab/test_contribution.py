"""A card's owner measures and sends one file: what is in it, what is refused, and how it goes on after a kill.

The trainings run on the virtual GPU, where the real one would be.
"""

import getpass
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import commands
from tests.hardware.test_local import FakeDevice, FakeNVML

import ullage
from ullage.errors import InvalidValue
from ullage.hardware import gpu as find_gpu
from ullage.measuring import contribution, machine
from ullage.measuring.contribution import TRAININGS, BadContribution, check, header_of, line_of, read
from ullage.measuring.single_run import measure_here

MIB = 1 << 20
HEADER = header_of(find_gpu("T4"), "580.159.03", "13.0", 91900)
RUN = {
    "peak_alloc": 51200,
    "peak_reserved": 2 * MIB,
    "end_alloc": 512,
    "end_reserved": 2 * MIB,
    "retries": 0,
    "segments": 1,
    "nvml_ctx": 300 * MIB,
    "nvml_end": 400 * MIB,
    "step_s": 0.01,
}


def stand_in(row, seconds):
    """What a training answers; a real one also says what must not get out."""
    return {**RUN, "events": f"/home/{getpass.getuser()}/x.npz", "host": "mallorys-box", "uuid": "GPU-0123"}


def written(tmp_path, measure_one=stand_in, seconds=60.0, **settings):
    path = tmp_path / "card.jsonl"
    done = list(contribution.contribute(path, HEADER, measure_one, seconds, **settings))
    return path, [name for name, _ in done]


def test_the_file_is_in_order_and_has_every_training(tmp_path):
    path, done = written(tmp_path)
    found = read(path)
    assert done == list(found.runs) == list(TRAININGS)
    assert found.gpu.name == "T4"
    assert [row["model"] for row in found.truth()][:2] == ["mlp:x", "mlp:x"]


def test_nothing_of_the_machine_gets_out(tmp_path):
    def failing(row, seconds):
        if row["id"] == "mlp":
            return {"failed": f"No such file: /home/{getpass.getuser()}/secret on mallorys-box"}
        if row["id"] == "vit":
            return {"failed": "No module named 'timm'"}
        return stand_in(row, seconds) | ({"oom": "CUDA out of memory. GPU 0"} if row["id"] == "vgg11" else {})

    path, _ = written(tmp_path, failing)
    text = path.read_text()
    for private in (f"/{getpass.getuser()}", "mallory", "GPU-", "secret", str(tmp_path), os.getcwd()):
        assert private not in text, private
    runs = read(path).runs
    assert [runs[name] for name in ("mlp", "vgg11", "vit")] == [
        {"failed": "failed"},
        {"failed": "out of memory"},
        {"failed": "not installed"},
    ]
    keys = {key for run in runs.values() for key in run}
    assert keys <= {*RUN, "failed"}


def test_after_a_kill_it_goes_on_with_what_is_left(tmp_path):
    path = tmp_path / "card.jsonl"
    script = tmp_path / "job.py"
    script.write_text(
        "import json, time\nfrom pathlib import Path\nfrom ullage.measuring.contribution import contribute\n"
        f"header, run = json.loads({json.dumps(json.dumps([HEADER, RUN]))})\n"
        "def one(row, left):\n"
        "    if row['id'] == 'gpt2':\n        print('hanging', flush=True)\n        time.sleep(100)\n    return run\n"
        f"list(contribute(Path({str(path)!r}), header, one, 100))\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "hanging\n"
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    with path.open("a") as file:
        file.write('{"id": "gpt2", "peak_al')  # as a kill in the middle of a line leaves it
    again = []
    rest = contribution.contribute(path, HEADER, lambda row, left: again.append(row["id"]) or RUN, 60)
    assert [name for name, _ in rest] == again == list(TRAININGS)[3:]
    assert list(read(path).runs) == list(TRAININGS)


def test_no_training_begins_after_the_time(tmp_path):
    now = iter(range(0, 1000, 10))
    path, done = written(tmp_path, seconds=45.0, clock=lambda: next(now))
    assert 0 < len(done) < 6
    assert list(read(path).runs) == done


def test_a_file_of_another_machine_is_left_as_it_is(tmp_path):
    path, _ = written(tmp_path)
    before = path.read_bytes()
    other = header_of(find_gpu("A100-40GB"), "580.159.03", "13.0", 91900)
    with pytest.raises(InvalidValue, match="another machine or other versions .gpu differ."):
        list(contribution.contribute(path, other, stand_in, 60))
    assert path.read_bytes() == before


def lines(header=HEADER, **run):
    return "\n".join(json.dumps(line) for line in (header, {"id": "mlp", **RUN, **run})).encode()


HOSTILE = {
    "not JSON": b"<html>",
    "no object": b"[1]",
    "empty": b"",
    "another format": b'{"format": "x"}',
    "a newer version": lines({**HEADER, "version": 2}),
    "an unknown key": lines({**HEADER, "user": "somebody"}),
    "an unknown figure": lines(host="somebody"),
    "a key twice": lines()[:-1] + b', "retries": 1}',
    "a training twice": lines() + b"\n" + lines().split(b"\n")[1],
    "no such training": lines().replace(b'"mlp"', b'"../../etc/passwd"'),
    "a list for an id": lines().replace(b'"mlp"', b'["mlp"]'),
    "NaN": lines().replace(b"0.01", b"NaN"),
    "infinity": lines().replace(b"0.01", b"1e999"),
    "a truth value": lines(retries=True),
    "a fraction of a byte": lines(peak_alloc=51200.5),
    "a huge number": lines().replace(b"51200", b"1" + b"0" * 5000),
    "below zero": lines(peak_alloc=-512),
    "more than the card": lines(peak_reserved=1 << 38),
    "more allocated than reserved": lines(peak_alloc=4 * MIB),
    "an odd size": lines(peak_alloc=51201),
    "an odd segment": lines(peak_reserved=3 * MIB),
    "less seen than reserved": lines(nvml_end=MIB),
    "a line that a terminal obeys": lines({**HEADER, "gpu": {**HEADER["gpu"], "name": "T4\x1b[2J"}}),
    "a path for a version": lines({**HEADER, "versions": {"torch": "/home/me"}}),
    "no PyTorch": lines({**HEADER, "versions": {}}),
    "deep nesting": b"[" * 60000,
    "a long line": b" " * 70000,
    "too many lines": lines() + b"\n{}" * 300,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=list(HOSTILE))
def test_what_cannot_be_is_refused_in_one_line(content):
    with pytest.raises(BadContribution) as refused:
        check(content)
    message = str(refused.value)
    assert "\n" not in message and "\x1b" not in message and len(message) < 250


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large.jsonl"
    path.write_bytes(b" " * (contribution.MOST_BYTES + 1))
    with pytest.raises(BadContribution, match="at most"):
        read(path)


def test_a_card_outside_the_catalogue_is_used_as_described():
    card = {"name": "NVIDIA X1", "memory": 20 << 30, "capability": "8.9", "sms": 46}
    found = check(json.dumps({**HEADER, "gpu": card}).encode()).gpu
    assert (found.memory, found.sms, found.compute_capability, found.context_measured) == (20 << 30, 46, (8, 9), False)


def test_the_trainings_are_small_and_fit_on_an_8_gb_card():
    for name in ("mlp", "mlp-bf16"):
        with ullage.virtual_gpu("T4") as gpu:
            line = line_of(name, measure_here({"row": {"id": name, **TRAININGS[name]}, "iterations": 2}))
        assert gpu.process_memory < 8 * 10**9
        check((json.dumps(HEADER) + "\n" + json.dumps(line)).encode())


def test_estimates_are_scored_on_a_file(tmp_path, capsys, monkeypatch):
    path = tmp_path / "card.jsonl"
    monkeypatch.setenv("ULLAGE_PYTORCH", "2.11")
    with ullage.virtual_gpu("T4"):
        line = line_of("mlp", measure_here({"row": {"id": "mlp", **TRAININGS["mlp"]}}))
    path.write_text(json.dumps(HEADER) + "\n" + json.dumps(line) + "\n" + '{"id": "vit", "failed": "failed"}\n')
    run = commands.typed_in(monkeypatch, capsys)
    code, out, err = run("evaluate", "--truth", path)
    assert code == 0, err
    assert "is in order: 1 trainings on T4" in out and "1 failed there" in out
    assert "100%" in out, "what the virtual card took is what is estimated"
    code, out, err = run("evaluate", "--truth", path, "--json")
    assert code == 0 and json.loads(out)
    path.write_text(json.dumps(HEADER | {"version": 99}) + "\n")
    code, out, err = run("evaluate", "--truth", path)
    assert code == 2 and "version must be" in err and "Traceback" not in err


def test_a_file_is_shown_in_full(tmp_path, capsys, monkeypatch):
    path, _ = written(tmp_path)
    run = commands.typed_in(monkeypatch, capsys)
    code, out, _ = run("contribute", "--show", path)
    assert code == 0 and "Tesla T4" in out and all(name in out for name in TRAININGS)
    code, out, _ = run("contribute", "--show", path, "--json")
    assert json.loads(out)["runs"]["mlp"] == RUN


def test_without_gpu_it_says_what_is_needed_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = commands.typed_in(monkeypatch, capsys)
    for words in (["contribute", "--yes"], ["measure", "context"]):
        code, _, err = run(*words)
        assert code == 1 and "finds no NVIDIA GPU" in err and "Traceback" not in err
    assert not list(Path().iterdir())


def test_it_asks_before_it_begins(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "describe", lambda: HEADER)
    monkeypatch.setattr(machine, "measure_one", stand_in)
    run = commands.typed_in(monkeypatch, capsys)
    code, _, err = run("contribute")
    assert code == 2 and "This will train 25 small models on Tesla T4" in err and "nothing was run" in err
    assert not list(Path().iterdir())
    code, out, _ = run("contribute", "--yes")
    assert code == 0 and "25 of 25 trainings are in contribution.jsonl" in out
    assert list(read(Path("contribution.jsonl")).runs) == list(TRAININGS)


class Nvml(FakeNVML):
    def nvmlSystemGetDriverVersion(self):
        return b"580.159.03"


def test_the_description_comes_from_nvml(monkeypatch):
    nvml = Nvml([FakeDevice("Tesla T4", 15360 * MIB, (7, 5))])
    header = machine.describe(nvml)
    assert header["gpu"] == {"name": "Tesla T4", "memory": 15360 * MIB, "capability": "7.5", "sms": 40}
    assert header["driver"] == "580.159.03"
    check(json.dumps(header).encode())


def test_a_context_is_measured_step_by_step():
    with ullage.virtual_gpu("A100-40GB") as gpu:
        found = machine.context_here({}, lambda: gpu.context + gpu.memory.allocator.reserved)
    assert list(found) == ["bare", "kernels", "matrix products", "convolutions"]
    assert found["bare"] < found["matrix products"] < found["convolutions"] == find_gpu("A100-40GB").context


def test_the_measured_context_serves_as_a_card_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(machine.as_own_card({"bare": 333 * MIB, "convolutions": 555 * MIB}, "A100-40GB"))
    card = find_gpu(path)
    assert (card.context, card.context_bare, card.context_upper) == (555 * MIB, 333 * MIB, 595 * MIB)
    assert not card.context_measured, "the kernels were not"


def test_hidden_processes_of_nvml_are_reported():
    with ullage.virtual_gpu("A100-40GB"), pytest.raises(RuntimeError, match="NVML does not say"):
        machine.context_here({}, lambda: None)
