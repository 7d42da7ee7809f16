"""The list of skips that are expected names tests that exist."""

import ast
from pathlib import Path

HERE = Path(__file__).parent


def test_every_line_names_a_test_that_can_be_skipped():
    lines = [line for line in (HERE / "expected_skips.txt").read_text().splitlines() if line and line[0] != "#"]
    names = {line.partition("|")[0].strip() for line in lines} - {"*"}
    trees = [ast.parse(file.read_text()) for file in HERE.rglob("test_*.py")]
    found = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert names and names <= found
    assert all(line.partition("|")[2].strip() for line in lines), "a line needs a part of the reason"
