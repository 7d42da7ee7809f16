"""Scripts of other frameworks get one line that says so, before anything runs or is installed; others are followed."""

import pytest
from tests.scripts import estimate_script

from ullage.errors import ScriptFailed
from ullage.estimation.scripts.frameworks import other_framework


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

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
    "import paddle.nn as nn": "PaddlePaddle",
    "import mxnet": "MXNet",
}


@pytest.mark.parametrize("source", OTHERS)
def test_another_framework_is_refused_before_any_run(script, source):
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
    "import keras",
    "import tensorflow\nimport some_package_that_may_bring_pytorch",
    "from tensorboard import program",
    "import jax\ndef f(:",
]


@pytest.mark.parametrize("source", FOLLOWED)
def test_a_script_that_may_use_pytorch_is_followed(script, source):
    assert other_framework(script(source)) is None


def test_a_project_with_modules_of_its_own_may_use_pytorch(script):
    for source in ("import tensorflow as tf\nfrom models import net", "import tensorflow as tf\nfrom . import net"):
        assert other_framework(script(source)) is None
    script("import jax", "package.py")
    assert other_framework("package", module=True) == "JAX"
