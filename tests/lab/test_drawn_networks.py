"""Files of measured runs name factories: every one of them still builds the model that was measured."""

import gzip
import importlib
import json
import lzma
import re
from functools import cache
from pathlib import Path

import pyarrow.parquet
import torch

from ullage.jobs import Model, build

ROOT = Path(__file__).resolve().parents[2]
FACTORY = re.compile(r'"((?:benchmarks/|ullage\.)[\w./]+:\w+)"')
ROW = re.compile(r'^\{.*"model": "(?:benchmarks/|ullage\.)', re.MULTILINE)


def text_of(file):
    """What a file says of models; of a table only the columns that name one."""
    if file.suffix == ".parquet":
        columns = {"model", "configuration"} & set(pyarrow.parquet.read_schema(file).names)
        table = pyarrow.parquet.read_table(file, columns=sorted(columns))
        return "\n".join(f'"{value}"' for name in table.column_names for value in table[name].unique().to_pylist())
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(file.suffix, bytes)
    return unpack(file.read_bytes()).decode()


@cache
def shipped():
    """What the files of measured runs say."""
    files = [file for folder in ("benchmarks/data", "src/ullage", "tests") for file in (ROOT / folder).rglob("*")]
    return [text_of(file) for file in files if re.search(r"\.(jsonl(\.gz|\.xz)?|parquet)$", file.name)]


def test_every_factory_that_a_file_names_is_there():
    found = {name for text in shipped() for name in FACTORY.findall(text)}
    assert len(found) > 40
    for name in found:
        place, _, factory = Model.from_row({"model": name, "batch": 1}).name.partition(":")
        assert callable(getattr(importlib.import_module(place), factory)), name


def test_models_have_as_many_parameters_as_when_measured():
    wanted = {}
    for text in shipped():
        for line in text.splitlines():
            if ROW.match(line) and '"parameters": ' in line:
                row = json.loads(line)
                if isinstance(row.get("model"), str) and row.get("parameters"):
                    wanted.setdefault(row["model"], row)
    assert len(wanted) > 15
    with torch.device("meta"):
        for name, row in wanted.items():
            model = build(Model.from_row(row))
            assert sum(each.numel() for each in model.parameters()) == row["parameters"], name
