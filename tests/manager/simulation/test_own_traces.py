"""Ullage's own form of traces: read, written, and errors that say where."""

import gzip
import json
from operator import attrgetter
from pathlib import Path

import pytest

from ullage.errors import UllageError
from ullage.manager.simulation.generator import generate_trace
from ullage.manager.simulation.known import known_workload
from ullage.manager.simulation.reading import read_trace, write_trace
from ullage.manager.simulation.trace import JobTrace
from ullage.units import GIB, MIB

TEXT = """\
id,arrival,user,kind,memory,gpus,work_s,priority,time_limit,estimate_gpumemnet,estimate_mine
7,30,ann,resnet50 b64,,1,600,5,2h,16GiB,
8,0,bob,,18GiB,2,1.5h,,,,20GiB
9,45.5,ann,my model,512MiB,,90,,,,
"""


def written(tmp_path: Path, text: str, name: str = "jobs.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def facts(trace: JobTrace) -> list[tuple[object, ...]]:
    names = attrgetter(
        "id", "arrival", "kind.name", "kind.memory", "kind.estimates", "work_s", "gpus", "user", "priority"
    )
    return [
        (*names(job), job.time_limit, {name: alone.step_s for name, alone in job.kind.alone.items()})
        for job in trace.jobs
    ]


def test_jobs_are_known_workloads_or_have_their_memory(tmp_path: Path) -> None:
    second, first, third = read_trace(written(tmp_path, TEXT)).jobs
    assert [job.arrival for job in (second, first, third)] == [0.0, 30.0, 45.5] and (first.id, second.id) == (7, 8)
    assert first.kind.name == "resnet50 b64" and first.kind.memory == known_workload("resnet50 b64").kind.memory
    assert first.kind.alone and first.kind.estimates["gpumemnet"] == 16 * GIB and first.kind.estimates["ullage"]
    assert (first.user, first.priority, first.time_limit, first.work_s) == ("ann", 5, 7200.0, 600.0)
    assert (second.kind.memory, second.gpus, second.work_s) == (18 * GIB, 2, 5400.0)
    assert second.kind.estimates == {"mine": 20 * GIB} and not second.kind.alone
    assert (third.kind.name, third.kind.memory, third.gpus, third.user) == ("my model", 512 * MIB, 1, "ann")


def test_jobs_that_are_alike_share_a_kind(tmp_path: Path) -> None:
    lines = "arrival,kind,work_s\n" + "".join(f"{second},vgg16 b32,60\n" for second in range(50))
    assert len(read_trace(written(tmp_path, lines)).kinds) == 1


def test_dates_are_counted_from_the_first_job(tmp_path: Path) -> None:
    times = ["2026-03-01T08:01:00Z", "2026-03-01 08:00:00", "2026-03-01T10:00:00+01:00"]
    text = "arrival,memory,work_s\n" + "".join(f"{time},1GiB,5\n" for time in times)
    assert [job.arrival for job in read_trace(written(tmp_path, text)).jobs] == [0.0, 60.0, 3600.0]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.json", "t.json.gz"])
def test_written_traces_are_read_again(tmp_path: Path, name: str) -> None:
    trace = generate_trace(60, 1, burst=2)
    write_trace(trace, tmp_path / name)
    again = read_trace(tmp_path / name)
    assert facts(again) == facts(trace)
    assert len(again.kinds) == len(trace.kinds)


def test_json_holds_what_a_kind_of_ones_own_does(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, TEXT))
    write_trace(trace, tmp_path / "t.json")
    assert facts(read_trace(tmp_path / "t.json")) == facts(trace)


@pytest.mark.parametrize("name", ["t.csv", "t.json"])
def test_an_estimator_without_an_answer_stays_so(tmp_path: Path, name: str) -> None:
    text = "arrival,kind,work_s,estimate_horus,estimate_mine\n0,vgg16 b32,5,-,\n1,vgg16 b32,5,,1GiB\n"
    trace = read_trace(written(tmp_path, text))
    assert [job.kind.estimates["horus"] for job in trace.jobs] == [
        None,
        known_workload("vgg16 b32").kind.estimates["horus"],
    ]
    write_trace(trace, tmp_path / name)
    assert facts(read_trace(tmp_path / name)) == facts(trace)


def test_a_plain_list_of_jobs_is_enough(tmp_path: Path) -> None:
    jobs = [{"arrival": 0, "memory": "2GiB", "work_s": 5}, {"arrival": 1, "kind": "bert_base b32", "work_s": "2m"}]
    first, second = read_trace(written(tmp_path, json.dumps(jobs), "jobs.json")).jobs
    assert (first.kind.memory, second.kind.name, second.work_s) == (2 * GIB, "bert_base b32", 120.0)


def test_the_examples_of_the_documentation_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "traces.md").read_text()
    for language, name, memory in [("text", "jobs.csv", 18 * GIB), ("json", "jobs.json", 18 * GIB)]:
        example = page.split(f"```{language}\n")[1].split("```")[0]
        assert read_trace(written(tmp_path, example, name)).jobs[1].kind.memory == memory


def test_only_the_first_jobs_are_taken(tmp_path: Path) -> None:
    assert [job.id for job in read_trace(written(tmp_path, TEXT), limit=2).jobs] == [8, 7]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = written(tmp_path, "mine", "t.csv")
    with pytest.raises(UllageError, match="already exists"):
        write_trace(generate_trace(2), path)
    assert path.read_text() == "mine"
    with pytest.raises(UllageError, match=r"must end in \.csv, \.json"):
        write_trace(generate_trace(2), tmp_path / "trace.txt")


HEAD = "arrival,kind,memory,gpus,work_s\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arrival,gpu,work_s\n", r"line 1: there is no column 'gpu'; did you mean gpus\?"),
        (HEAD + "0,resnet50 b65,,1,5\n", "line 2: no known workload named 'resnet50 b65'; did you mean"),
        (HEAD + "0,,,1,5\n", "line 2: kind or memory must have a value, but both are empty"),
        (HEAD + "0,,nan,1,5\n", "line 2: kind or memory must have a value, but both are empty"),
        (HEAD + "nan,,2GiB,1,5\n", "line 2: arrival must have a value, got 'nan'"),
        (HEAD + ",,2GiB,1,5\n", "line 2: arrival must have a value, but it is empty"),
        (HEAD + "0,,2GiB,1,nan\n", "^[^:]*jobs.csv, line 2: work_s must have a value, got 'nan'"),
        (HEAD + "0,,2GiB,1,5\n1,,2 pints,1,5\n", "line 3: memory: size must look like 512MiB"),
        (HEAD + "soon,,2GiB,1,5\n", "line 2: arrival must be a number of seconds or a time .*, got 'soon'"),
        (HEAD + "0,,2GiB,1.5,5\n", "line 2: gpus must be a whole number, got '1.5'"),
        (HEAD + "0,,2GiB,0,5\n", "line 2: job 1 must have arrival >= 0, work_s >= 0 and gpus >= 1, got"),
        (HEAD + "-1,,2GiB,1,5\n", "line 2: job 1 must have arrival >= 0"),
        (HEAD + "0,,2GiB,1,5\n2026-01-01T00:00:00,,2GiB,1,5\n", "line 3: arrivals must all be seconds"),
        (HEAD + "inf,,2GiB,1,5\n", "line 2: arrival must be a number of seconds or a time"),
        ("id," + HEAD + "4,0,,2GiB,1,5\n4,1,,2GiB,1,5\n", "line 3: id must be a unique number, but another"),
        (HEAD, "has no jobs"),
        ("", "jobs.csv must be a trace of jobs .*, but it is empty"),
        ("a,b\n1,2\n", "in no known form of traces; name it with --trace-format .* ullage: Ullage's own form"),
        ('{"jobs": [{"arrival": 0, "work_s": 1, "gpu": 2, "memory": 1}]}', "job 1: there is no 'gpu'"),
        ('{"arrival": 0, "work_s": 1}', "must be a list of jobs"),
        ('[{"arrival": 0, "work_s":', "line 1: not JSON"),
        ('{"ullage_trace": 1, "kinds": {"a": {}}, "jobs": []}', "the kind 'a' is not one: 'memory' is missing"),
    ],
)
def test_errors_name_the_place_the_rule_and_the_value(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UllageError, match=words):
        read_trace(written(tmp_path, text))


def test_files_that_cannot_be_read_are_one_message(tmp_path: Path) -> None:
    for name, content, words in [
        ("no.csv", None, "cannot read .*no.csv: No such file"),
        ("bad.csv.gz", b"not packed", "is not a gzip file, or it is damaged"),
        ("cut.csv.gz", gzip.compress(HEAD.encode())[:-9], "is not a gzip file, or it is damaged"),
        ("b.csv", b"\xff\xfe\x00", "but it is not text"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UllageError, match=words):
            read_trace(tmp_path / name)
    with pytest.raises(UllageError, match="no form of traces named 'phily'"):
        read_trace(tmp_path / "x", format="phily")
    with pytest.raises(UllageError, match="is a folder: there must be one of"):
        read_trace(tmp_path)
