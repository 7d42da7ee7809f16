"""A policy of one's own from a Python file: what is loaded, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from ullage.cli import completion
from ullage.errors import InvalidValue, NotAllowed, UllageError, UnknownName
from ullage.manager.policy_files import load_policy
from ullage.manager.settings import read_settings

GOOD = '"""Mine."""\n\ndef choose(job, gpus, now):\n    "The first one."\n    return gpus[0]\n'


def written(folder: Path, text: str = GOOD) -> Path:
    file = folder / "mine.py"
    file.write_text(text)
    return file


def test_a_function_of_a_file_becomes_a_policy(tmp_path: Path) -> None:
    policy = load_policy(f"{written(tmp_path)}:choose")
    assert (policy.name, policy.summary, policy.backfills) == ("mine.py:choose", "The first one.", True)


def test_a_file_may_import_neighbours_and_define_anything(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("FIRST = 0\n")
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport beside\n\n"
        "@dataclass\nclass Weight:\n    of: int = beside.FIRST\n\ndef choose(job, gpus, now):\n    return gpus[0]\n"
    )
    assert load_policy(f"{written(tmp_path, text)}:choose").summary == "a policy of one's own"


@pytest.mark.parametrize(
    ("text", "name", "kind", "message"),
    [
        (GOOD, "chose", UnknownName, "did you mean 'choose'?"),
        ("x = 1\n", "x", UnknownName, "no function in"),
        ("def choose(job):\n    return None\n", "choose", InvalidValue, "must be choose(job, gpus, now)"),
        ("def choose(:\n", "choose", InvalidValue, "SyntaxError"),
        ("import no_such_package\n", "choose", InvalidValue, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit(3)\n", "choose", InvalidValue, "SystemExit: 3"),
    ],
)
def test_a_mistake_is_one_message(tmp_path: Path, text: str, name: str, kind: type[UllageError], message: str) -> None:
    with pytest.raises(kind) as raised:
        load_policy(f"{written(tmp_path, text)}:{name}")
    assert message in str(raised.value) and "mine.py" in str(raised.value)


def test_a_file_that_is_not_there_and_a_name_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"no file /no/such.py; it must be a Python file with the function choose"):
        load_policy("/no/such.py:choose")
    with pytest.raises(UnknownName, match=r"did you mean 'magm'\?.*one of your own: FILE.py:FUNCTION"):
        load_policy("magn")


def test_a_relative_path_in_settings_starts_at_their_file(tmp_path: Path) -> None:
    settings = tmp_path / "ullage.toml"
    settings.write_text('policy = "mine.py:choose"\n')
    written(tmp_path)
    assert load_policy(read_settings(settings).policy).name == "mine.py:choose"
    settings.write_text('policy = "magm"\n')
    assert read_settings(settings).policy == "magm"


def test_a_daemon_takes_no_file_that_others_can_change(tmp_path: Path) -> None:
    file = written(tmp_path)
    load_policy(f"{file}:choose", guarded=True)
    file.chmod(0o646)
    with pytest.raises(NotAllowed, match=f"others can change {file}; .* type: chmod go-w {file}"):
        load_policy(f"{file}:choose", guarded=True)
    load_policy(f"{file}:choose")
    file.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.raises(NotAllowed, match=f"others can change {tmp_path};"):
        load_policy(f"{file}:choose", guarded=True)


def test_the_shell_completes_functions_that_could_be_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, GOOD + "def _own(a, b, c): ...\ndef other(a): ...\ndef second(a, b, c): ...\n")
    (tmp_path / "broken.py").write_text("def choose(:\n")
    monkeypatch.chdir(tmp_path)
    assert completion.policies("m") == ["magm", "mug", "mine.py:choose", "mine.py:second"]
    assert completion.policies("./mi") == ["./mine.py:choose", "./mine.py:second"]
    assert completion.policies(f"{tmp_path}/mine.py:s") == [f"{tmp_path}/mine.py:second"]
    assert completion.policies("b") == ["best-fit"]
