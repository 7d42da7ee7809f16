"""Estimates without a job: asked over the API and the socket, kept for ever, and made with the rights of who asks."""

import json
import os
import sys

import pytest
import requests

import ullage
import ullage.manager
from ullage.errors import InvalidValue, NotAllowed, UllageError, UnknownName
from ullage.jobs.estimate_spec import EstimateSpec
from ullage.jobs.job_files import JobSpec
from ullage.manager.core.estimates import key_of
from ullage.manager.core.questions import question_of, request_of

MODEL = {"model": "torchvision:alexnet", "options": {"batch_size": 4, "input_shape": [3, 64, 64]}, "gpu": "T4"}
SCRIPT = """
import sys, torch
from width import WIDTH

layer = torch.nn.Linear(WIDTH, int(sys.argv[1])).to("cuda")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.ones(8, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def asked(make_home, tmp_path_factory):
    home = make_home(tmp_path_factory.mktemp("asked") / "h")
    home.options += ["--api", "0"]
    home.start()
    yield home
    home.close()


def remote(home):
    run = home.folder / "run"
    return json.loads((run / "api.json").read_text())["url"], (run / "api-token").read_text().strip()


@pytest.fixture
def api(asked):
    url, token = remote(asked)
    return ullage.manager.Client(url=url, token=token)


def test_a_model_estimate_without_a_job_survives_a_kill(asked, api):
    answer = api.estimate(timeout=120, **MODEL)
    assert (answer["state"], answer["question"]["gpu"], answer["reason"]) == ("done", ["T4"], None)
    [found] = answer["estimates"]
    here = ullage.estimate(
        ullage.Model("torchvision:alexnet", batch_size=4, input_shape=[3, 64, 64]), gpu="T4"
    ).to_dict()
    assert {name: value for name, value in found.items() if name != "seconds"} == {
        name: value for name, value in json.loads(json.dumps(here)).items() if name != "seconds"
    }
    assert api.queue() == []
    asked.kill()
    asked.start()
    assert asked.client.estimated(answer["id"]) == answer


def test_a_script_is_sent_as_text_and_leaves_nothing(asked, api):
    (asked.work / "width.py").write_text("WIDTH = 512\n")
    before = sorted(os.listdir(asked.work))
    question = {"script": SCRIPT, "args": ["256"], "cwd": str(asked.work), "env": {"SECRET": "x"}, "details": False}
    answer = asked.client.estimate(timeout=120, gpu=["T4", "H200"], **question)
    assert [each["gpu"] for each in answer["estimates"]] == ["T4", "H200"], answer
    assert all(each["breakdown"]["parameters"] >= 512 * 256 * 4 for each in answer["estimates"])
    assert answer["estimates"][0]["source"] == "script.py" and "timeline" not in answer["estimates"][0]
    assert [name for name in sorted(os.listdir(asked.work)) if name != "__pycache__"] == before
    assert "SECRET" not in json.dumps(api.estimated(answer["id"]))


def test_advice_says_what_would_make_it_fit(asked):
    script = "import torch\nkept = torch.zeros(20 << 30, dtype=torch.uint8, device='cuda')"
    answer = asked.client.estimate(timeout=120, script=script, gpu="T4", advice=True, details=False)
    assert not answer["estimates"][0]["fits"] and answer["advice"]["largest"] is None
    [option] = answer["advice"]["options"]
    assert option["fits"] and option["change"].startswith("a larger GPU: ") and option["takes"] > 20 << 30


def test_a_question_can_be_cancelled_by_who_asked(asked):
    slow = asked.client.call("estimate", question={"script": "import time; time.sleep(200)"})["id"]
    asked.client.cancel_estimate(slow)
    answer = asked.client.estimated(slow, 10)
    assert (answer["state"], answer["reason"]) == ("failed", "it was cancelled")
    asked.until(lambda: not asked.client.ping()["estimates_pending"], "its process to end")
    asked.client.cancel_estimate(slow)


def test_why_there_is_no_estimate_is_the_answer(asked):
    failed = asked.client.estimate(timeout=120, script="raise ValueError('no data here')")
    assert failed["state"] == "failed" and "no data here" in failed["reason"] and failed["estimates"] == []
    assert failed["reason"].startswith("script.py fails: ") and "/tmp" not in failed["reason"]
    assert failed["question"]["gpu"] == ["A100-40GB"]  # the daemon's own


def test_a_question_and_a_job_share_one_estimate(asked):
    (asked.work / "width.py").write_text("WIDTH = 64\n")
    (asked.work / "train.py").write_text(SCRIPT)
    where = {"cwd": str(asked.work), "env": asked.environment()}

    def question(args, **more):
        answer = asked.client.estimate(timeout=120, command=[sys.executable, "train.py", *args], **where, **more)
        assert answer["state"] == "done", answer
        return answer["estimates"]

    def job(args, **more):
        command = [sys.executable, "train.py", *args]
        number = asked.submit(command, memory=None, hold=True, env=where["env"], estimator="ullage", **more)
        return asked.until(lambda: asked.job(number)["estimate"] and asked.job(number), "its estimate")

    [first] = question(["8"])
    assert first["timeline"] and first["layers"] and first["seconds"] > 0
    after = job(["8"])
    assert after["estimate"].endswith("(kept from before)") and after["promise"] == first["upper"]
    brief = {name: value for name, value in first.items() if name not in ("timeline", "layers")}
    assert question(["8"]) == [first] and question(["8"], details=False) == [brief], "not even `seconds` is another"

    before = job(["16"], name="named")
    assert not before["estimate"].endswith("(kept from before)")
    [later] = question(["16"])
    assert later["upper"] == before["promise"] and later["timeline"]
    assert question(["16"], gpu="T4") != [later], "a GPU of its own"
    (asked.work / "width.py").write_text("WIDTH = 65536\n")
    assert question(["16"])[0]["upper"] > later["upper"], "a file that the script reads is another"


@pytest.mark.parametrize(
    "job",
    [
        {"command": ["python", "train.py"], "gpus": 2},
        {"command": ["torchrun", "--nproc_per_node", "2", "train.py"], "gpus": 2, "env": {"BATCH": "8"}},
        {"command": ["make"], "model": "torchvision:alexnet", "batch_size": 4},
    ],
)
def test_a_job_asks_what_the_question_about_it_asks(job):
    spec = JobSpec.model_validate({**job, "cwd": "/home/ann"})
    question = EstimateSpec.model_validate(question_of(spec) | {"gpu": "T4"})
    assert request_of(question, uid=1, gid=1).key == key_of(spec, 1, "ullage", ["T4"])


@pytest.mark.slow
def test_a_question_outlives_the_daemon_that_it_was_put_to(asked):
    asked.kill()
    asked.start(crash_at="order-before-answer", wait=False)
    asked.client.close()
    with pytest.raises(UllageError):
        asked.until(asked.answers, "the daemon")
        asked.client.call("estimate", question=MODEL)
    asked.process.wait()
    asked.start()
    newest = asked.client.estimates()[0]
    assert newest["question"]["model"] == MODEL["model"] and "estimates" not in newest
    found = asked.until(lambda: asked.client.estimated(newest["id"], 10)["estimates"], "the answer")
    assert found[0]["gpu"] == "T4"


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ({"gpu": "T4"}, "needs one of model, script and command, got none"),
        ({"model": "x", "script": "y"}, "got model and script"),
        ({"model": "x", "gpu": "/etc/shadow.toml"}, "got the path"),
        ({"model": "x", "gpu": "H20O"}, "did you mean 'H20'"),
        ({"model": "x", "estimator": "nobody's"}, "estimator"),
        ({"model": "x", "options": {"gpu": "T4"}}, "gpu cannot be one of them"),
        ({"command": ["make", "train"]}, "must run a script"),
        ({"script": "x", "cwd": "here"}, "path must be absolute"),
        ({"modle": "x"}, "did you mean 'model'"),
    ],
)
def test_impossible_questions_are_refused_at_once(asked, api, question, says):
    with pytest.raises((InvalidValue, UnknownName), match=says):
        asked.client.call("estimate", question=question)
    with pytest.raises((InvalidValue, UnknownName), match=says):
        api.call("estimate", question=question)


def test_an_unknown_id_is_not_found(asked, api):
    url, token = remote(asked)
    found = requests.get(f"{url}/v1/estimates/0", headers={"Authorization": f"Bearer {token}"}, timeout=60)
    assert found.status_code == 404 and found.json()["message"] == "no estimate named '0'"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to speak as another user")
def test_the_id_of_an_estimate_shows_its_answer_not_its_script(asked, api):
    url, _ = remote(asked)
    mine = asked.client.estimate(timeout=120, script="raise ValueError('mine')", cwd=str(asked.work))
    theirs = ullage.manager.Client(url=url, token=api.token_create("theirs", "submit", user="nobody")["token"])
    seen = theirs.estimated(mine["id"])
    assert seen["state"] == "failed" and "script" in mine["question"] and set(seen["question"]) == {"gpu"}
    with pytest.raises(NotAllowed, match="may not use what"):
        theirs.dry_run(["true"], cwd="/", expected=mine["id"])
    with pytest.raises(NotAllowed, match="may not cancel what"):
        theirs.cancel_estimate(mine["id"])
    who = theirs.estimate(timeout=120, script="import os; raise ValueError(f'I am {os.getuid()}')")
    # A Python in root's own folder cannot be run by anybody else, which shows it too.
    assert "I am 65534" in who["reason"] or "Permission denied" in who["reason"]
    (asked.work / "mine.py").write_text("import torch\ntorch.zeros(1 << 20, device='cuda')\n")
    asked.work.chmod(0o700)
    where = {"command": [sys.executable, "mine.py"], "cwd": str(asked.work)}
    assert asked.client.estimate(timeout=120, **where)["state"] == "done"
    assert "Permission denied" in theirs.estimate(timeout=120, **where)["reason"], "no answer of another user's"
    reader = ullage.manager.Client(url=url, token=api.token_create("reader", "read", user="nobody")["token"])
    with pytest.raises(NotAllowed, match="scope submit"):
        reader.estimate(**MODEL)
    assert reader.estimated(mine["id"])["state"] == "failed"
