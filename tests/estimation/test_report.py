"""The report in a terminal, in a notebook and as JSON."""

import io
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console
from tests.paths import ROOT

import ullage
from ullage.errors import InvalidValue
from ullage.estimation.advice import Suggestion
from ullage.estimation.result import Estimate
from ullage.estimation.tables import print_gpu_table, print_report
from ullage.estimation.words import BREAKDOWN_WORDS

GIB = 2**30
DOCS = ROOT / "docs"


GUESSED = {"workspaces": 1, "of": 4, "bytes": 25, "of_bytes": 100}
MADE_UP = {"what": "values that the code read", "count": 2, "covered": False}
COMPILED = {"what": "torch.compile", "count": 1, "covered": False}


def example(**changes) -> Estimate:
    parts = {"parameters": 1, "gradients": 1, "optimizer": 2, "activations": 6, "workspace": 0, "fragmentation": 3}
    breakdown = {name: size * GIB for name, size in parts.items()} | {"context": GIB}
    values = dict(
        gpu="A100-40GB",
        gpu_memory=40 * GIB,
        peak_allocated=10 * GIB,
        peak_reserved=13 * GIB,
        process_memory=14 * GIB,
        upper=15 * GIB,
        breakdown=breakdown,
        fits=True,
        headroom=26 * GIB,
        steps=3,
        seconds=1.5,
        peak_operator="aten.mm.default",
        peak_module="layer3.4.conv2",
        peak_pass="backward",
        peak_step=2,
        reserved_operator="aten._foreach_sqrt.default",
        reserved_module="Adam.step()",
        reserved_pass="optimizer",
        reserved_step=1,
        doubtful=0,
        measured=True,
        source="torchvision:resnet50",
        notes=["<i>a note</i>"],
        timeline=[(1, 2, 3)],
    )
    return Estimate(**values | changes)


def too_large() -> Estimate:
    return example(fits=False, gpu="T4", gpu_memory=8 * GIB, headroom=-6 * GIB, out_of_memory="CUDA out of memory.")


def printed(show, *args) -> str:
    out = io.StringIO()
    show(*args[:1], Console(file=out, width=110, color_system=None), *args[1:])
    return out.getvalue()


def test_the_verdict_comes_first_and_the_report_is_complete():
    text = printed(print_report, example())
    assert text.splitlines()[:2] == ["torchvision:resnet50", "✓ fits on A100-40GB: 14.0 of 40.0 GiB, 26.0 GiB free"]
    assert all(name in text for name in example().breakdown) and "At the peak (backward pass, step 2):" in text
    for words in (
        "backward pass of layer3.4.conv2, step 2 (mm)",
        "in Adam.step(), step 1",
        "at most 15.0 GiB",
        "a note",
    ):
        assert words in text
    bar = next(line for line in text.splitlines() if "█" in line)
    assert bar.count("█") == round(76 * 14 / 40) and len(bar.strip()) == 76


def test_a_job_that_does_not_fit_says_what_would_help():
    options = [
        Suggestion("mixed precision", example(gpu="T4", gpu_memory=16 * GIB, headroom=2 * GIB)),
        Suggestion("batch 3 for 8", example(gpu="T4", gpu_memory=15 * GIB - 1, headroom=GIB - 1)),
        Suggestion("checkpointing", too_large()),
        Suggestion("bf16", None, "no [bf16] here"),
    ]
    text = printed(print_report, too_large(), options)
    assert "✗ DOES NOT FIT on T4: needs 14.0 of 8.00 GiB, 6.00 GiB too much" in text
    assert "T4 ends here" in text and "CUDA out of memory" in text
    rows = {line.split("│")[2].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "2.00 GiB free" in rows["mixed precision"] and "tight" not in rows["mixed precision"]
    assert "tight" in rows["batch 3 for 8"]
    assert "does not fit" in rows["checkpointing"] and "no [bf16] here" in rows["bf16"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "every kernel is known"),
        ({"doubtful": GIB}, "doubtful, one may be 1.00 GiB larger; the bound allows for this"),
        ({"guessed": GUESSED, "doubtful": GIB}, "1 of 4 convolution workspaces were guessed (25% of their"),
        (
            {"guessed": GUESSED, "assumed": [MADE_UP]},
            "2 values that the code read; the bound does not cover val",
        ),
        ({"left_out": [COMPILED | {"adds": 2 * GIB}]}, "the bound adds 2.00 GiB for this, which may be too little"),
        (
            {"left_out": [COMPILED | {"adds": GIB}], "assumed": [MADE_UP]},
            "the bound adds 1.00 GiB for torch.compile, which may be too little; the bound does not cover values",
        ),
        ({"left_out": [COMPILED]}, "at most 15.0 GiB: left out: torch.compile; the bound does not cover this"),
        ({"measured": False}, "not measured on A100-40GB: rules for other GPUs; the bound adds 5%"),
        ({"measured": None}, "at most 15.0 GiB"),
    ],
)
def test_how_sure_it_is(changes, words):
    assert words in example(**changes).certainty
    assert ("every kernel is known" in example(**changes).certainty) is (not changes)
    assert words in " ".join(printed(print_report, example(**changes)).split())


def test_notes_that_differ_only_in_their_numbers_are_one_line():
    many = [f"nonzero of ({size},) taken as all {size} elements ({size % 3 + 2} times)" for size in range(100, 150)]
    text = " ".join(printed(print_report, example(notes=[*many, "non-maximum suppression was taken"])).split())
    assert "- nonzero of (100,) taken as all 100 elements, and 49 more like it (151 times in all" in text
    assert text.count("nonzero") == 1 and "- non-maximum suppression" in text
    assert len(json.loads(example(notes=many).to_json())["notes"]) == 50


def test_phases_are_shown_when_there_are_several():
    assert "validation" not in printed(print_report, example(phases={"training": GIB}))
    text = printed(print_report, example(phases={"training": 2 * GIB, "validation": GIB, "after training": GIB}))
    assert "validation" in text and "after training 1.00 GiB reserved at most" in " ".join(text.split())


def narrow(show, *args) -> list[str]:
    out = io.StringIO()
    show(*args, Console(file=out, width=80, color_system=None))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_gpu_table_lists_fitting_ones_first_in_80_columns():
    longest = max((card.name for card in ullage.gpus()), key=len)
    cards = [
        replace(too_large(), computed_on="A100-40GB", attention=["math"], gpu="RTX-PRO-6000-Server"),
        replace(example(attention=["efficient"]), gpu="H200", gpu_memory=999 * GIB, headroom=985 * GIB),
        replace(example(attention=["flash"]), measured=False),
        replace(too_large(), gpu=longest if len(longest) < 20 else "P100", gpu_memory=7 * GIB, attention=["math"]),
    ]
    lines = narrow(print_gpu_table, cards)
    rows = [line.split() for line in lines if "✓" in line or "✗" in line]
    assert [row[0] for row in rows] == ["✓", "✓", "✗", "✗"]
    assert [row[1] for row in rows][:3] == ["A100-40GB", "H200", "RTX-PRO-6000-Server"]
    assert all(row[-1] in ("math", "flash", "efficient") and row.count("GiB") == 4 for row in rows)
    text = " ".join(lines)
    assert "fits on 2 of 4 GPUs; 3 runs, the others share one" in text
    assert "attention as math keeps the scores of all pairs of tokens" in text
    assert "1 were not measured" in text and "<i>a note</i>" in text


def test_a_table_whose_gpus_do_the_same_gives_no_reasons():
    text = " ".join(narrow(print_gpu_table, [example(attention=[]), too_large()]))
    assert "math" not in text and "cuDNN" not in text and "█" in text


def test_json_and_back():
    e = example()
    values = json.loads(e.to_json())
    assert Estimate.from_dict(values) == e and values["schema_version"] == 1
    assert "timeline" not in json.loads(e.to_json(timeline=False))
    assert Estimate.from_dict(values | {"a_later_key": 7}) == e
    old = {name: values[name] for name in values if not name.startswith(("peak_m", "reserved_", "phases", "schema"))}
    assert Estimate.from_dict(old).phases == {}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "gpu, gpu_memory, peak_allocated"),
        ([], "got list"),
        (example().to_dict() | {"schema_version": 99}, "newer Ullage"),
    ],
)
def test_invalid_estimates_are_refused(values, said):
    with pytest.raises(InvalidValue, match=said):
        Estimate.from_dict(values)


def test_every_json_key_is_documented():
    text = (DOCS / "reference" / "json.md").read_text()
    for name in [*example().to_dict(), *BREAKDOWN_WORDS]:
        assert f"`{name}`" in text, f"docs/reference/json.md does not explain {name}"


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("e", [example(), too_large(), example(notes=[], source=None, peak_operator=None)])
def test_a_notebook_shows_a_card(e):
    html = e._repr_html_()
    seen = Balanced()
    seen.feed(html)
    assert not seen.open and not seen.links and "<script" not in html and "<i>" not in html
    text = "".join(seen.text)
    assert e.verdict in text and "activations" in text and (not e.notes or "<i>a note</i>" in text)


def test_the_estimate_of_a_real_run_is_shown():
    import torch

    e = ullage.estimate(lambda: torch.zeros(1 << 20, device="cuda"), gpu="T4")
    assert "fits on T4" in printed(print_report, e) and "not measured on T4" in e.certainty
    assert Estimate.from_dict(json.loads(e.to_json())) == e
