"""Scripts are run in this process where that is enough: a process for each would take a minute more."""

import json
import sys
import textwrap

import pytest

from ullage.estimation.scripts.child import ScriptRequest, ScriptRun
from ullage.hardware import gpu as find_gpu


@pytest.fixture
def follow(tmp_path, monkeypatch, capfd):
    """Write a script, run it here on a virtual GPU and return its answer."""

    def run(source, *args, steps=3, gpu="H200", limited=True, launcher=(), sizes=None):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)  # whatever the script sets is taken back
        request = ScriptRequest(
            path=str(script),
            args=list(args),
            module=False,
            gpu=find_gpu(gpu),
            steps=steps,
            timeout=60.0,
            limited=limited,
            launcher=list(launcher),
            sizes=sizes or {},
        )
        answers = []
        ScriptRun(request, answers.append, leave=lambda seconds: None).run()
        answer = json.loads(json.dumps(answers[0]))
        answer["printed"], answer["trace"] = capfd.readouterr()
        return answer

    return run


@pytest.fixture
def estimated(follow):
    """The same for a script that must give an estimate; returns the estimate's values."""

    def run(source, *args, **options):
        answer = follow(source, *args, **options)
        assert answer["status"] == "estimated", answer
        return answer["estimate"] | {"printed": answer["printed"]}

    return run
