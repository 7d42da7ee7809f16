"""Scripts of other frameworks get one line that says so, before anything runs or is installed; others are followed."""

import pytest
from tests.scripts import estimate_script

from ullage.errors import ScriptFailed
from ullage.estimation.scripts.failures import is_own, message
from ullage.estimation.scripts.frameworks import framework_of, other_framework


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)

    def write(source, name="train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
        return name

    return write


OTHERS = {
    "import jax, numpy as np\nfrom jax import numpy as jnp": "JAX",
    "from flax import linen as nn\nimport optax, tqdm": "JAX",
    "import tensorflow as tf": "TensorFlow",
    "from tensorflow import keras": "TensorFlow",
    "import keras": "Keras",
    "import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras": "Keras",
    "import paddle.nn as nn": "PaddlePaddle",
    "import mxnet": "MXNet",
}


@pytest.mark.parametrize("source", OTHERS)
def test_another_framework_is_told_before_anything_runs(script, source):
    name = script(source)
    with pytest.raises(ScriptFailed) as failure:
        estimate_script(name)
    assert str(failure.value) == (
        f"train.py uses {OTHERS[source]}, and nothing in it imports PyTorch: only PyTorch is followed"
    )
    assert not failure.value.own


FOLLOWED = [
    "import tensorflow as tf\nimport os, torch",
    "import tensorflow as tf\nfrom transformers import Trainer",
    "import jax\ndef train():\n    import torch",
    "try:\n    import tensorflow\nexcept ImportError:\n    pass",
    "if False:\n    import jax",
    "import os\nos.environ['KERAS_BACKEND'] = 'torch'\nimport keras",
    "import os\nos.environ.setdefault('KERAS_BACKEND', 'torch')\nimport keras",
    "import tensorflow\nimport some_package_that_may_bring_pytorch",
    "from tensorboard import program",
    "import jax\ndef f(:",
]


@pytest.mark.parametrize("source", FOLLOWED)
def test_a_script_that_may_use_pytorch_is_followed(script, source):
    assert other_framework(script(source)) is None


def test_keras_may_be_told_to_use_pytorch_from_outside(script, monkeypatch, tmp_path):
    name = script("import keras")
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    assert other_framework(name) is None
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert other_framework(name) == "Keras"
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert other_framework(name) is None


def test_a_project_with_modules_of_its_own_may_use_pytorch(script):
    for source in ("import tensorflow as tf\nfrom models import net", "import tensorflow as tf\nfrom . import net"):
        assert other_framework(script(source)) is None
    script("import jax", "package.py")
    assert other_framework("package", module=True) == "JAX"


@pytest.mark.parametrize(("own", "framework"), [("import jax", "JAX"), ("from  torch import nn", None)])
def test_a_failed_script_reports_the_framework_that_it_imported(script, follow, own, framework):
    script("", "jax.py")
    script(own, f"layers_{framework}.py")
    source = f"import jax\nfrom layers_{framework} import *\nraise ValueError"
    failed = follow(source)
    assert framework_of(script(source), False, failed["imported"]) == framework


def test_a_framework_that_came_to_light_in_the_run_is_told(script, follow):
    """It was not sure before: another package might have brought PyTorch."""
    source = "import some_package_of_mine, jax"
    name = script(source)
    failed = follow("import jax_is_not_installed_here")
    assert framework_of(name, False, ["jax"]) == "JAX" and framework_of(name, False, [""]) is None
    failure = {**failed, "framework": "JAX"}
    assert "only PyTorch is followed" in message(failure, name, 60.0) and not is_own(failure)
    script("import torch, some_package_of_mine, tensorflow")
    assert framework_of(name, False, ["tensorflow"]) is None
