"""The list of refused words is kept: `python tests/words.py` finds nothing, and would find what is listed."""

import ast
import subprocess
import sys

from tests import words

PHRASES = {"whoever": "users who", "/so many(th|ths)\\b/": "1/N", "so many": "N"}


def test_nothing_that_is_refused_is_written():
    command = [sys.executable, words.ROOT / "tests/words.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_phrases_are_found_in_prose_but_not_in_code():
    text = "`whoever`\n\n```\nwhoever\n```\nFor Whoever reads so\nmany pages, every so manyth one."
    assert [fault.split(";")[0] for fault in words.prose_faults(text, PHRASES)] == [
        "6: 'Whoever'",
        "7: 'so manyth'",
        "6: 'so\\nmany'",
    ]
    assert not [*words.prose_faults("Summarymany sober words", PHRASES)]


def test_names_are_found_where_they_are_bound():
    text = "def told(a):\n    said.told = a\n    return told\n"
    assert [*words.code_faults(text, {"told": "reply"})] == ["1: the name told; choose reply"] + [
        "2: the name told; choose reply"
    ]


def test_a_name_is_allowed_where_the_list_says_so():
    text = "kept = found = 1\n"
    assert [*words.code_faults(text, {"kept": "rows", "found": "path"}, ["kept"])] == ["1: the name found; choose path"]


def test_every_allowed_name_is_still_bound_in_its_file():
    for file, names in words.refused()["allowed"].items():
        bound = {name for _, name in words.bound_names(ast.parse((words.ROOT / file).read_text()))}
        assert bound >= {*names}, file
