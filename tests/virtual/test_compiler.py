"""What the compiler's stand-ins do, in processes of their own: what is imported once stays."""

import json
import subprocess
import sys

import pytest
import torch

OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
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


CASES = {
    "not loaded": ("  train(); print(loaded())", "[]"),
    "loaded when asked": (
        "  train(); import torch._dynamo; torch._dynamo.list_backends(); print(loaded()); train()",
        "['torch._dynamo.eval_frame', 'sympy.core']",
    ),
    "a part of it": (
        "  from torch._dynamo import config; config.verbose = True\n"
        "  import torch._dynamo.config as same; print(same is config, same.verbose)",
        "True True",
    ),
    "sympy": ("  import sympy\n  class Own(sympy.Basic): pass\n  print(Own.__mro__[1].__module__)", "sympy.core.basic"),
    "a symbol": ("  import sympy; print(sympy.Symbol('x', integer=True) + 1)", "x + 1"),
    "a part of sympy": ("  from sympy.abc import x; print(x + 1)", "x + 1"),
    "its version": (
        "  import sympy; print(sympy.__version__[:2]); import os.path; print(os.path.isfile(sympy.__file__))",
        "1.\nTrue",
    ),
    "kept by somebody": (
        "  import sympy as kept, torch._dynamo; torch._dynamo.list_backends(); print(kept.__version__[:2])",
        "1.",
    ),
    "found": (
        "  from importlib.util import find_spec; print([find_spec(name).name for name in ('sympy', 'torch._dynamo')])",
        "['sympy', 'torch._dynamo']",
    ),
    "gone afterwards": (
        "  train()\nprint({'torch._dynamo', 'sympy'} & set(sys.modules))\n"
        "print('__dynamo_disable' in vars(torch.optim.Optimizer.add_param_group.__wrapped__))",
        "set()\nFalse",
    ),
    "nothing to forget": (
        "  import torch._dynamo.convert_frame; train()\nprint('torch._inductor.compile_fx' in sys.modules)",
        "False",
    ),
    "compiling afterwards": (
        "  train()\nprint(torch.compile(lambda x: x * 2, backend='eager')(torch.ones(2)).tolist())",
        "[2.0, 2.0]",
    ),
}


# Each case is forked from a process that has imported PyTorch and Ullage, and nothing of the compiler.
FORKS = """
import json, os
for code in json.load(sys.stdin):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    print(chr(0), end="")
"""


@pytest.fixture(scope="module")
def said():
    """What each case printed."""
    codes = [f"with ullage.virtual_gpu('T4'):\n{code}" for code, _ in CASES.values()]
    done = subprocess.run(
        [sys.executable, "-c", TRAIN + FORKS], input=json.dumps(codes), capture_output=True, text=True, timeout=300
    )
    return dict(zip(CASES, done.stdout.split("\0"), strict=False)), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_compiler_is_loaded_only_on_use(said, case):
    if OLDER and case in ("not loaded", "gone afterwards"):
        pytest.skip("needs PyTorch 2.12 or newer: older ones load their compiler in other ways")
    printed, errors = said
    assert printed[case].strip() == CASES[case][1], errors
