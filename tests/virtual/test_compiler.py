"""What the compiler's stand-ins do, in processes of their own: what is imported once stays."""

import subprocess
import sys

import pytest

TRAIN = """
import sys, torch, ullage
loaded = lambda: [name for name in ("torch._dynamo.eval_frame", "sympy.core") if name in sys.modules]
def train():
    layer = torch.nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        (layer(torch.ones(2, 4, device="cuda")) * 3).square().sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("with ullage.virtual_gpu('T4'):\n  train()\n  print(loaded())", "[]"),
        ("with ullage.virtual_gpu('T4'):\n  train()\n  import torch._dynamo\n  torch._dynamo.list_backends()\n  print(loaded())\n"
         "  train()", "['torch._dynamo.eval_frame', 'sympy.core']"),
        ("with ullage.virtual_gpu('T4'):\n  train()\n  from torch._dynamo import config\n  config.verbose = True\n"
         "  import torch._dynamo.config as same\n  print(same is config, same.verbose)", "True True"),
        ("with ullage.virtual_gpu('T4'):\n  import sympy\n  class Mine(sympy.Basic): pass\n  print(Mine.__mro__[1])",
         "<class 'sympy.core.basic.Basic'>"),
        ("with ullage.virtual_gpu('T4'):\n  import importlib.util\n  print(importlib.util.find_spec('sympy').name, "
         "importlib.util.find_spec('torch._dynamo').name)", "sympy torch._dynamo"),
        ("with ullage.virtual_gpu('T4'): train()\nprint([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])\n"
         "step = torch.optim.Optimizer.add_param_group\nprint('__dynamo_disable' in vars(step.__wrapped__))", "[]\nFalse"),
        ("with ullage.virtual_gpu('T4'): train()\n"
         "compiled = torch.compile(lambda x: x * 2, backend='eager')\nprint(compiled(torch.ones(2)).tolist())", "[2.0, 2.0]"),
    ],
    ids=["not loaded", "loaded when asked", "a part of it", "sympy", "found", "gone afterwards", "compiling afterwards"],
)  # fmt: skip
def test_the_compiler_is_loaded_only_when_it_is_asked_for_something(code, said):
    done = subprocess.run([sys.executable, "-c", TRAIN + code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == said, done.stderr
