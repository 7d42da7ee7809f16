"""Public cluster traces, by small files in their forms that were made up here."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ullage.errors import UllageError
from ullage.manager.simulation.known import known_workloads
from ullage.manager.simulation.reading import read_trace
from ullage.manager.simulation.trace import JobTrace

HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"


def philly_job(submitted: str, *attempts: tuple[str | None, str | None, int], user: str = "u1") -> dict[str, Any]:
    detail = [
        {"start_time": begin, "end_time": end, "detail": [{"ip": "m1", "gpus": [f"gpu{i}" for i in range(gpus)]}]}
        for begin, end, gpus in attempts
    ]
    return {"status": "Pass", "vc": "v", "jobid": "a", "attempts": detail, "submitted_time": submitted, "user": user}


def facts(trace: JobTrace) -> list[tuple[object, ...]]:
    return [(job.id, job.arrival, job.work_s, job.gpus, job.user) for job in trace.jobs]


def said(trace: JobTrace, words: str) -> bool:
    return any(words in note for note in trace.notes)


def test_philly(tmp_path: Path) -> None:
    jobs = [
        philly_job(
            "2017-10-07 01:11:39",
            ("2017-10-07 01:12:00", "2017-10-07 01:13:00", 8),
            ("2017-10-07 02:00:00", "2017-10-08 02:00:00", 4),
        ),
        philly_job("2017-10-07 01:10:39", ("2017-10-07 01:11:00", "2017-10-07 01:11:30", 1), user="u2"),
        philly_job("2017-10-07 01:10:40"),
        philly_job("2017-10-07 01:10:41", ("2017-10-07 01:11:00", "None", 1), (None, None, 1)),
    ]
    path = tmp_path / "cluster_job_log"
    path.write_text(json.dumps(jobs))
    trace = read_trace(path)
    assert facts(trace) == [(1, 0.0, 30.0, 1, "u2"), (2, 60.0, 86460.0, 8, "u1")]
    assert said(trace, "sum of its attempts") and said(
        trace, "2 jobs are left out: without GPUs, or without a known run time"
    )
    assert facts(read_trace(tmp_path)) == facts(trace)


def test_helios(tmp_path: Path) -> None:
    rows = [
        "3,uA,vc1,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:27,2020-06-09 18:45:36,249,0",
        "1,uB,vc1,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0",
        "2,uB,vc1,0,8,1,COMPLETED,2020-06-09 18:41:02,2020-06-09 18:41:02,2020-06-09 18:50:00,538,0",
    ]
    (tmp_path / "cluster_log.csv").write_text(HELIOS + "\n".join(rows))
    trace = read_trace(tmp_path / "cluster_log.csv")
    assert facts(trace) == [(1, 0.0, 36848.0, 1, "uB"), (2, 26.0, 249.0, 4, "uA")]
    assert said(trace, "1 job is left out: without GPUs")


def test_alibaba_2023(tmp_path: Path) -> None:
    rows = [
        "openb-pod-0017,88000,327680,8,1000,,Burstable,Succeeded,9437497,10769854,9437500",
        "openb-pod-0022,4000,15258,1,220,,BE,Running,9437400,9437500,9437450",
        "openb-pod-0006,16500,51200,0,0,,LS,Running,9437401,9437500,9437450",
        "openb-pod-0007,16500,51200,1,1000,V100M16|V100M32,LS,Pending,9437402,9437500,",
    ]
    (tmp_path / "openb_pod_list_gpuspec33.csv").write_text(PODS + "\n".join(rows))
    trace = read_trace(tmp_path / "openb_pod_list_gpuspec33.csv")
    assert facts(trace) == [(1, 0.0, 50.0, 1, "user"), (2, 97.0, 1332354.0, 8, "user")]
    assert said(trace, "2 jobs are left out: without GPUs") and said(trace, "a part of a GPU needs one GPU")


def pai(tmp_path: Path, jobs: bool = True) -> Path:
    tasks = [
        "job1,tensorflow,1.0,Terminated,1000.0,1600.0,600.0,29.3,50.0,MISC",
        "job2,ps,2.0,Terminated,1100.0,2100.0,600.0,29.3,,",
        "job2,worker,3.0,Terminated,1150.0,2000.0,600.0,29.3,100.0,V100",
        "job2,evaluator,1.0,Failed,1200.0,2050.0,600.0,29.3,50.0,T4",
        "job3,worker,1.0,Running,1300.0,,600.0,29.3,100.0,T4",
        "job4,worker,1.0,Terminated,1400.0,1500.0,600.0,29.3,0.0,",
    ]
    (tmp_path / "pai_task_table.csv").write_text("\n".join(tasks) + "\n")
    if jobs:
        lines = ["job1,i1,userA,Terminated,990.0,1600.0", "job2,i2,userB,Terminated,1000.0,2100.0"]
        (tmp_path / "pai_job_table.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("name", ["", "pai_task_table.csv", "pai_job_table.csv"])
def test_alibaba_2020(tmp_path: Path, name: str) -> None:
    trace = read_trace(pai(tmp_path) / name)
    assert facts(trace) == [(1, 0.0, 600.0, 1, "userA"), (2, 10.0, 900.0, 4, "userB")]
    assert said(trace, "2 jobs are left out: without GPUs") and said(trace, "all its instances")


def test_alibaba_2020_without_the_table_of_jobs_or_of_tasks(tmp_path: Path) -> None:
    trace = read_trace(pai(tmp_path, jobs=False))
    assert facts(trace) == [(1, 0.0, 600.0, 1, "user"), (2, 150.0, 900.0, 4, "user")]
    assert said(trace, "without pai_job_table.csv")
    pai(tmp_path)
    (tmp_path / "pai_task_table.csv").unlink()
    with pytest.raises(UllageError, match="pai_task_table.csv must be next to"):
        read_trace(tmp_path / "pai_job_table.csv")


def test_alibaba_2020_with_a_first_line_of_names(tmp_path: Path) -> None:
    plain = facts(read_trace(pai(tmp_path)))
    path = tmp_path / "pai_task_table.csv"
    names = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
    path.write_text(names + path.read_text())
    assert facts(read_trace(path)) == plain


def many(tmp_path: Path, count: int = 1000) -> Path:
    """Jobs of which each works longer than the one before it."""
    rows = [f"{i},u{i % 7},vc,1,1,1,COMPLETED,2020-06-09 18:41:01,,,{60 + i},0" for i in range(count)]
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress((HELIOS + "\n".join(rows)).encode()))
    return path


def test_workloads_are_given_by_work_in_the_shares_of_the_mix(tmp_path: Path) -> None:
    trace = read_trace(many(tmp_path))
    sizes = [known_workloads()[job.kind.name].size for job in trace.jobs]
    assert Counter(sizes) == {"light": 650, "medium": 270, "large": 80}
    assert sizes == sorted(sizes, key=["light", "medium", "large"].index)
    assert len({job.kind.name for job in trace.jobs}) > 30 and len(trace.kinds) < 36
    assert said(trace, "65% light, 27% medium, 8% large (seed 0)") and said(trace, "counts as the work of a job that")
    heavy = Counter(known_workloads()[job.kind.name].size for job in read_trace(many(tmp_path), mix="heavy").jobs)
    assert heavy == {"medium": 830, "large": 170}


def test_the_seed_decides_which_workload_of_its_size_a_job_is(tmp_path: Path) -> None:
    def kinds(seed: int) -> list[str]:
        return [job.kind.name for job in read_trace(many(tmp_path), seed=seed).jobs]

    assert kinds(1) == kinds(1) != kinds(2)


def test_limit_takes_the_first_jobs_before_workloads_are_given(tmp_path: Path) -> None:
    trace = read_trace(many(tmp_path), limit=100)
    assert Counter(known_workloads()[job.kind.name].size for job in trace.jobs)["large"] == 8


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("log.csv", HELIOS + "1,u,v,two,1,1,X,2020-06-09 18:41:01,,,5,0\n", "line 2: gpu_num must be a number"),
        ("log.csv", HELIOS + "1,u,v,2,1,1,X,yesterday,,,5,0\n", "line 2: submit_time must be a number of seconds"),
        ("log.csv", HELIOS + "1,u,v,0,1,1,X,2020-06-09 18:41:01,,,5,0\n", "has no jobs on GPUs"),
        ("log", '[{"attempts": [], "submitted_time": "soon"}]', "job 1: the job must be as in Philly's"),
        (
            "log",
            '[{"attempts": [{"start_time": "2017-10-07 01:12:00", "end_time": "2017-10-07 01:12:00"}], '
            '"submitted_time": ""}]',
            "job 1: the key detail is missing",
        ),
    ],
)
def test_errors_say_where(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UllageError, match=words):
        read_trace(path)


def test_a_named_form_is_taken_at_its_word(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UllageError, match="line 1: the columns must include user, got a, b"):
        read_trace(path, format="helios")
