"""Asking estimators: in processes of their own, under a time limit, with answers kept as they come."""

import importlib.util
import json
import os
import sys
import time

import pytest

from ullage.errors import InvalidValue
from ullage_lab.judge.questions import Question, answers, questions, read_answers
from ullage_lab.judge.truth import MeasuredRun, TruthSet, read_truth
from ullage_lab.judge.worker import ask_apart

STAND_IN = '''
import os, time
from ullage.estimation.result import Estimate

def ask(name, row, gpu):
    """Estimators that do what estimators should not do."""
    if "asked" in row:
        with open(row["asked"], "a") as out:
            out.write(name + "\\n")
    print("noise that is no answer")
    if name == "refuses":
        return "needs a summary"
    if name == "raises":
        raise ValueError("cannot\\nat all")
    if name == "leaves":
        os._exit(3)
    if name == "hangs":
        time.sleep(60)
    if name == "greedy":
        bytearray(1 << 50)
    return Estimate(gpu=gpu, gpu_memory=100, peak_allocated=5, peak_reserved=7, process_memory=9, upper=10,
                    breakdown={"context": 2}, fits=True, headroom=91, steps=1, seconds=0.0, notes=["a note"])
'''


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand_in")
    (folder / "stand_in_estimators.py").write_text(STAND_IN)
    sys.path.insert(0, str(folder))
    import stand_in_estimators

    yield stand_in_estimators.ask
    sys.path.remove(str(folder))


def test_an_answer_is_what_a_record_keeps(ask):
    began = time.perf_counter()
    record = ask_apart(ask, "good", "r1", {}, "H200", 60)
    passed = time.perf_counter() - began
    assert (record.figure, record.kind, record.allocated, record.reserved, record.process) == (9, "process", 5, 7, 9)
    assert (record.upper, record.context, record.failed, record.notes) == (10, 2, None, ("a note",))
    assert 0 < record.seconds < passed and 0 <= record.cpu_seconds < passed * os.cpu_count()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raises", "ValueError: cannot"),
        ("leaves", "the process ended without an answer, with exit code 3"),
        ("greedy", "took more memory of this machine than it may"),
        ("hangs", "took longer than 2 s"),
    ],
)
def test_a_failure_of_an_estimator_is_recorded(ask, name, text):
    record = ask_apart(ask, name, "r1", {}, "H200", 2 if name == "hangs" else 60)
    assert record.failed.startswith(text) and record.figure is None and record.unsupported is None
    assert record.seconds > 0


def test_unsupported_jobs_are_not_failures(ask):
    record = ask_apart(ask, "refuses", "r1", {}, "H200", 60)
    assert (record.unsupported, record.failed, record.given) == ("needs a summary", None, False)


def truth_set(asked, count=3):
    rows = [{"model": "mlp:x", "batch": 1 + number, "asked": str(asked)} for number in range(count)]
    runs = [MeasuredRun(id=f"r{number}", row=row, family="MLPs", process=9) for number, row in enumerate(rows)]
    return TruthSet(name="t", gpu="H200", runs=runs)


def test_a_stopped_ranking_goes_on(ask, tmp_path):
    file, asked = tmp_path / "answers.jsonl", tmp_path / "asked"
    every = questions([truth_set(asked)], {"good": None, "refuses": 2})
    assert [(q.estimator, q.run.id) for q in every].count(("good", "r1")) == 1 and len(every) == 5
    begun = answers(every, ask, limit=60, file=file)
    next(begun), next(begun)
    begun.close()
    with file.open("a") as out:
        out.write('{"key": "cut off by a cra')
    found = [record for _, record in answers(every, ask, limit=60, file=file)]
    assert len(found) == 5 and sum(record.given for record in found) == 3
    assert len(asked.read_text().split()) == 5, "what was answered is not asked again"
    assert len(read_answers(file)) == 5


def test_an_answer_counts_only_for_the_run_that_was_asked_about():
    first = MeasuredRun(id="r0", row={"model": "mlp:x", "batch": 1}, family="MLPs")
    other = MeasuredRun(id="r0", row={"model": "mlp:x", "batch": 2}, family="MLPs")
    measured = MeasuredRun(id="r0", row={"model": "mlp:x", "batch": 1, "peak_alloc": 5}, family="MLPs")
    key = Question("good", first, "H200").key
    assert key == Question("good", measured, "H200").key
    assert len({key, Question("good", other, "H200").key, Question("good", first, "T4").key}) == 3


def test_a_run_of_two_campaigns_is_asked_about_once(tmp_path):
    one = truth_set(tmp_path / "asked")
    assert len(questions([one, one], {"good": None})) == 3


def test_a_file_that_holds_something_else_is_refused(tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps({"model": "x"}) + "\n")
    with pytest.raises(InvalidValue, match="--resume"):
        read_answers(file)


REALWORLD = """model,family,batch_size,input,gpus,optimizer,actual_mib_2025_05,actual_mib_2025_09,horus_mib
vgg16,CNN,32,3x224x224 ImageNet,1,Adam,8222.0,6684.0,21525.75
bert_base,Transformer,32,seq512 WikiText-2,1,AdamW,,19828.0,
gpt2_large,Transformer,8,seq512 WikiText-2,2,AdamW,27902.0,28356.0,127676.0
dlrm,Other,32768,Criteo TB,1,,,1468.0,40000
resnet50,CNN,128,3x224x224 ImageNet,1,Adam,40000.0,13236.0,40000
"""


def test_two_campaigns_of_one_table(tmp_path):
    file = tmp_path / "realworld.csv"
    file.write_text(REALWORLD)
    may, september = read_truth(file)
    assert (may.gpu, september.gpu) == ("A100-40GB", "A100-40GB")
    assert [run.id for run in may.runs] == ["realworld-00"]
    assert [run.id for run in september.runs] == ["realworld-00", "realworld-01", "realworld-04"]
    assert (may.runs[0].process, september.runs[0].process) == (8222 << 20, 6684 << 20)
    assert may.runs[0].row == {
        "model": "torchvision:vgg16",
        "batch": 32,
        "opt": "adam",
        "precision": "fp32",
        "input": [3, 224, 224],
    }
    assert september.runs[1].row["seq"] == 512 and "input" not in september.runs[1].row
    (theirs,) = may.published
    assert (theirs.estimator, theirs.figure, theirs.kind) == ("horus (published)", 21525.75 * 2**20, "process")
    assert [one.run for one in september.published] == ["realworld-00"], "40000 is a cap and no estimate"
    assert may.left_out == {
        "not measured in this campaign": 2,
        "on two GPUs": 1,
        "near the card's end, perhaps clipped": 1,
    }


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="the package timm is not installed")
def test_the_timm_table(tmp_path):
    file = tmp_path / "timm.csv"
    file.write_text("model,batch_size,actual_max_mib\nresnet50,8,3000\nresnet50,128,40300\nno_such_model,8,3000\n")
    (found,) = read_truth(file)
    assert [(run.id, run.row["model"], run.process) for run in found.runs] == [
        ("resnet50-8", "timm:resnet50", 3000 << 20)
    ]
    assert found.left_out["near the card's end, perhaps clipped"] == 1 and sum(found.left_out.values()) == 2


def test_another_table_is_refused(tmp_path):
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidValue, match="got a, b"):
        read_truth(file)


def test_an_interrupted_ranking_ends_its_runs_and_keeps_answers(ask, tmp_path):
    """Nothing waits for the estimator that hangs, and that it was stopped is no answer of its own."""
    kept = tmp_path / "kept.jsonl"
    runs = [MeasuredRun(id=name, row={}, family="mlp") for name in ("r1", "r2")]
    asked = [Question("good", runs[0], "H200"), Question("hangs", runs[1], "H200")]
    given = answers(asked, ask, limit=600, file=kept)
    assert next(given)[1].figure == 9
    given.close()
    assert [json.loads(line)["estimator"] for line in kept.read_text().splitlines()] == ["good"]
