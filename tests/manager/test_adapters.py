"""Other schedulers ask a real daemon: what a pod, a task of SkyPilot and a job of submitit get."""

import base64
import json
import threading
import types
import urllib.error
import urllib.request

import pytest

from ullage.adapters import kubernetes, service, skypilot, submitit
from ullage.errors import InvalidValue
from ullage.units import GIB, MIB

MODEL = {"model": "torchvision:alexnet", "options": {"batch_size": 4, "input_shape": [3, 64, 64]}}


@pytest.fixture(scope="module")
def daemon(make_home, tmp_path_factory):
    home = make_home(tmp_path_factory.mktemp("adapters") / "h")
    home.start()
    yield home
    home.close()


@pytest.fixture
def here(daemon, monkeypatch):
    monkeypatch.setenv("ULLAGE_HOME", str(daemon.folder))
    return daemon


def told(upper, *, gpu="T4", memory=15 * GIB, fits=True):
    """An answer of the daemon."""
    return {"state": "done", "reason": None,
            "estimates": [{"gpu": gpu, "upper": upper, "fits": fits, "gpu_memory": memory}]}  # fmt: skip


def pod(*containers, scheduler=None, **notes):
    annotations = {"ullage/question": json.dumps({**MODEL, "gpu": "T4"})} | notes
    spec = {"containers": list(containers)} | ({"schedulerName": scheduler} if scheduler else {})
    return {
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {"uid": "u-1", "kind": {"group": "", "version": "v1", "kind": "Pod"},
                    "object": {"metadata": {"annotations": annotations}, "spec": spec}},
    }  # fmt: skip


def of_gpu(**limits):
    return {"name": "train", "resources": {"limits": {"nvidia.com/gpu": "1", **limits}}}


def patched(asked, answer):
    """The pod as the API server makes it of the answer."""
    response = answer["response"]
    assert (response["uid"], response["allowed"], answer["kind"]) == ("u-1", True, "AdmissionReview")
    found = asked["request"]["object"]
    if "patch" not in response:
        return None
    assert response["patchType"] == "JSONPatch"
    for change in json.loads(base64.b64decode(response["patch"])):
        place, *path = [part.replace("~1", "/").replace("~0", "~") for part in change["path"].split("/")[1:]]
        at = found[place]
        for part in path[:-1]:
            at = at[int(part)] if isinstance(at, list) else at[part]
        assert change["op"] == "add" and path[-1] not in at
        at[path[-1]] = change["value"]
    return found


def test_a_pod_gets_the_memory_of_kai_or_of_hami():
    for_kai = pod({"name": "train"}, scheduler="kai-scheduler")
    found = patched(for_kai, kubernetes.review(for_kai, lambda question: told(3 * GIB + 1)))
    assert found["metadata"]["annotations"]["gpu-memory"] == "3073" and found["spec"]["containers"] == [
        {"name": "train"}
    ]
    for_hami = pod({"name": "sidecar"}, of_gpu())
    found = patched(for_hami, kubernetes.review(for_hami, lambda question: told(2 * GIB)))
    assert found["spec"]["containers"][1]["resources"]["limits"] == {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "2048"}
    assert "gpu-memory" not in found["metadata"]["annotations"]


def test_what_a_pod_says_itself_and_what_nobody_asked_about_stays():
    def nobody(question):
        raise AssertionError("nobody is asked")

    said = [
        pod({"name": "x"}, scheduler="kai-scheduler", **{"gpu-memory": "5"}),
        pod(of_gpu(**{"nvidia.com/gpumem": "5"})),
        pod({"name": "no GPU"}),
    ]
    said[-1]["request"]["object"]["metadata"] = {}
    for asked in said:
        assert patched(asked, kubernetes.review(asked, nobody)) is None


def test_a_pod_that_fits_nowhere_is_refused_and_one_that_nobody_can_estimate_is_admitted_with_a_warning():
    asked = pod(of_gpu())
    refused = kubernetes.review(asked, lambda question: told(50 * GIB, fits=False))["response"]
    assert refused["allowed"] is False and "fits on none of T4" in refused["status"]["message"]
    for answer in ({"state": "failed", "reason": "no such model", "estimates": []},
                   {"state": "waiting", "reason": None, "estimates": []}):  # fmt: skip
        admitted = kubernetes.review(asked, lambda question, answer=answer: answer)["response"]
        assert admitted["allowed"] and "there is no estimate" in admitted["warnings"][0] and "patch" not in admitted
    asked["request"]["object"]["metadata"]["annotations"]["ullage/question"] = "resnet"
    assert "needed a question as JSON" in kubernetes.review(asked, lambda question: told(1))["response"]["warnings"][0]


def test_the_webhook_asks_a_real_daemon_over_http(here):
    server = kubernetes.server(0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/"

        def post(body):
            return json.load(urllib.request.urlopen(urllib.request.Request(url, body), timeout=60))

        asked = pod({"name": "train"}, scheduler="kai-scheduler")
        found = None
        for _ in range(20):  # a slow machine may need more than its patience; the answer is kept for the next pod
            found = found or patched(asked, post(json.dumps(asked).encode()))
        memory = int(found["metadata"]["annotations"]["gpu-memory"])
        assert 300 < memory < 4000
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(b"{}")
        assert refused.value.code == 400
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def task(**values):
    return types.SimpleNamespace(**{"envs": {}, "run": None, "workdir": None, "resources": [], **values})


def test_what_a_task_of_skypilot_runs_is_found_in_it(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("print('trains')")
    found = skypilot.question_of(task(run="cd .\npython train.py --epochs 3\n", workdir=str(tmp_path)))
    assert found["command"][1:] == ["train.py", "--epochs", "3"] and found["cwd"] == str(tmp_path)
    monkeypatch.setenv(service.URL, "http://elsewhere:1")
    sent = skypilot.question_of(task(run="python train.py --epochs 3\n", workdir=str(tmp_path)))
    assert sent == {"script": "print('trains')", "args": ["--epochs", "3"]}
    assert skypilot.question_of(task(run="make", workdir=str(tmp_path))) is None
    assert skypilot.question_of(task(envs={"ULLAGE_QUESTION": json.dumps(MODEL)})) == MODEL
    with pytest.raises(InvalidValue, match="needed a question as JSON"):
        skypilot.question_of(task(envs={"ULLAGE_QUESTION": "resnet"}))


def test_the_smallest_gpu_that_fits_is_chosen_by_a_real_daemon(here, monkeypatch):
    monkeypatch.setenv(skypilot.ACCELERATORS, "H100,T4,L4")
    assert skypilot.SmallestGPU._accelerator(MODEL) == "T4"
    monkeypatch.setattr(skypilot.SmallestGPU, "ask", staticmethod(lambda question: told(20 * GIB, fits=False)))
    with pytest.raises(InvalidValue, match="fits on none of T4: it takes up to 20.0 GiB"):
        skypilot.SmallestGPU._accelerator(MODEL)


def test_the_policy_changes_a_real_task(monkeypatch):
    sky = pytest.importorskip("sky", reason="the package skypilot is not installed")
    monkeypatch.setattr(
        skypilot.SmallestGPU, "ask", staticmethod(lambda question: told(GIB, gpu="L4", memory=22 * GIB))
    )
    plain = sky.Task(run="python train.py", envs={"ULLAGE_QUESTION": json.dumps(MODEL)})
    request = types.SimpleNamespace(task=plain, skypilot_config=sky.Config())
    changed = skypilot.SmallestGPU().apply(request)
    assert [each.accelerators for each in changed.task.resources] == [{"L4": 1}]
    named = sky.Task(run="x", envs={"ULLAGE_QUESTION": "{}"}).set_resources(sky.Resources(accelerators="A100:1"))
    request = types.SimpleNamespace(task=named, skypilot_config=sky.Config())
    assert [each.accelerators for each in skypilot.SmallestGPU().apply(request).task.resources] == [{"A100": 1}]


class Slurm:
    """What submitit's executor for Slurm does with parameters."""

    cluster = "slurm"

    def __init__(self):
        self.parameters, self.submitted = {"additional_parameters": {"qos": "high"}}, []

    def update_parameters(self, **parameters):
        self.parameters |= parameters

    def submit(self, function, *args, **more):
        self.submitted.append((function, args, more))
        return len(self.submitted)


def test_a_job_of_submitit_asks_for_the_shards_that_it_takes(tmp_path):
    asked = []

    def ask(question):
        asked.append(question)
        return told(3 * GIB + 1)

    command = types.SimpleNamespace(command=["python", "train.py"], cwd=tmp_path, env={"A": "b"})
    executor = Slurm()
    assert submitit.submit(executor, command, "x", gpu="T4", ask=ask, lr=0.1) == 1
    assert asked[0]["command"] == ["python", "train.py", "x", "--lr=0.1"] and asked[0]["env"]["A"] == "b"
    given = executor.parameters["additional_parameters"]
    assert (given["qos"], given["gres"]) == ("high", "shard:4") and '"shards":4' in given["comment"]
    assert executor.submitted == [(command, ("x",), {"lr": 0.1})]
    with pytest.raises(InvalidValue, match="can never run"):
        submitit.submit(executor, command, gpu="T4", ask=lambda question: told(20 * GIB, fits=False))
    assert len(executor.submitted) == 1


def double(count):
    import torch

    return torch.empty(count * MIB, dtype=torch.uint8, device="cuda").numel()


def test_a_function_of_submitit_is_run_on_a_virtual_gpu():
    need = submitit.need_of(double, 512, gpu="T4")
    assert need.fits and 512 * MIB < need.upper < 3 * GIB
