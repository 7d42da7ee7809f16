"""The examples for other schedulers, with the real packages and a real daemon."""

import importlib.util
import json
import pathlib
import types

import pytest

MODEL = {"model": "torchvision:alexnet", "options": {"batch_size": 4, "input_shape": [3, 64, 64]}}
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples/schedulers"


@pytest.fixture
def skypilot():
    pytest.importorskip("sky", reason="the package skypilot is not installed")
    spec = importlib.util.spec_from_file_location("skypilot_policy", EXAMPLES / "skypilot_policy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def daemon(make_home, tmp_path_factory):
    home = make_home(tmp_path_factory.mktemp("schedulers") / "h")
    home.start()
    yield home
    home.close()


def test_the_policy_changes_a_real_task(skypilot, daemon, monkeypatch):
    import sky

    monkeypatch.setenv("ULLAGE_HOME", str(daemon.folder))
    plain = sky.Task(run="python train.py", envs={"ULLAGE_QUESTION": json.dumps(MODEL)})
    request = types.SimpleNamespace(task=plain, skypilot_config=sky.Config())
    changed = skypilot.SmallestGPU().apply(request)
    assert [each.accelerators for each in changed.task.resources] == [{"T4": 1}]
    named = sky.Task(run="x", envs={"ULLAGE_QUESTION": "{}"}).set_resources(sky.Resources(accelerators="A100:1"))
    request = types.SimpleNamespace(task=named, skypilot_config=sky.Config())
    assert [each.accelerators for each in skypilot.SmallestGPU().apply(request).task.resources] == [{"A100": 1}]


def test_a_task_that_fits_on_no_gpu_is_refused(skypilot, daemon, monkeypatch):
    monkeypatch.setenv("ULLAGE_HOME", str(daemon.folder))
    monkeypatch.setattr(skypilot, "GPUS", {"T4": "T4"})
    large = {"model": "torchvision:vgg16", "options": {"batch_size": 2048}}
    with pytest.raises(ValueError, match="fits on none of T4"):
        skypilot.SmallestGPU.smallest(large)
