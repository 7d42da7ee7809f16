"""The documentation is true where a program can tell: links, commands, Python blocks, paths.

It needs no MkDocs: `make docs` builds the site and refuses warnings. Pages are read as they are, except that generated
parts are generated.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from tests.loops import for_each

import ullage
from ullage.cli import all_commands
from ullage.cli.main import with_launcher_apart

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LAB = ROOT / "lab" / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([*DOCS.rglob("*.md"), *LAB.glob("*.md")])
OTHERS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples", "tests")),
    *sorted(RESULTS.glob("*.md")),
    *sorted([*ROOT.glob("src/ullage/**/data/*.md"), *ROOT.glob("lab/src/**/data/*.md")]),  # about shipped weights
]
EVERYTHING = PAGES + OTHERS
RECORDED = [page for page in [*PAGES, ROOT / "README.md"] if "<!-- record -->" in page.read_text()]

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>\w+) -->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
INLINE = re.compile(r"`(ullage [a-zA-Z-][^`]*)`")
NAMED_FILE = re.compile(r"`((?:src|tests|benchmarks|examples|docs)/[\w./-]+)`")
NAMED_EXTRA = re.compile(r"(?:ullage|\.)\[([\w,]+)\]")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def _load(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = _load("hooks")


@functools.cache
def read(page):
    """A page with its generated parts."""
    text = page.read_text()
    return re.sub(r"^<!-- generated: (\w+) -->$", lambda found: hooks.GENERATORS[found[1]](), text, flags=re.MULTILINE)


def blocks(page, *languages):
    """The code blocks of a page in these languages, with the line of their beginning."""
    text = read(page)
    for found in BLOCK.finditer(text):
        if found["language"] in languages:
            yield text[: found.start("text")].count("\n") + 1, textwrap.dedent(found["text"]), found["mark"]


@functools.cache
def prose(page):
    """A page without its code blocks."""
    return BLOCK.sub("", read(page))


@functools.cache
def anchors(page):
    """What a link to a heading of a page may name."""
    names = []
    for heading in HEADING.findall(prose(page)):
        plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading).replace("`", "")
        names.append(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip()))
    return names


def named(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    ("what", "found", "least"),
    [
        ("links", lambda page: LINK.findall(prose(page)), 300),
        ("commands in blocks", lambda page: [*command_lines(page)], 390),
        ("commands in the text", lambda page: INLINE.findall(" ".join(prose(page).split())), 200),
        ("files of the repository", lambda page: NAMED_FILE.findall(prose(page)), 100),
        ("extras", lambda page: NAMED_EXTRA.findall(page.read_text()), 8),
        ("Python", lambda page: [*blocks(page, "python")], 25),
        ("TOML", lambda page: [*blocks(page, "toml")], 7),
        ("recorded blocks", lambda page: [block for block in blocks(page, "console") if block[2] == "record"], 15),
    ],
)
def test_patterns_find_something(what, found, least):
    assert sum(len(found(page)) for page in EVERYTHING) >= least, what


# Links


@for_each(EVERYTHING, name=named)
def test_links_resolve(page):
    for link in LINK.findall(prose(page)):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: no heading of that name; there are {anchors(target)}"


@for_each(EVERYTHING, name=named)
def test_headings_of_a_page_are_unique(page):
    if page.name != "CHANGELOG.md":  # every version has an "Added"
        assert len(set(anchors(page))) == len(anchors(page))


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r"(\S+\.md)$", nav, re.MULTILINE)
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    pages += [f"lab/{page.name}" for page in LAB.glob("*.md")]
    pages += [f"results/{page.name.replace('README', 'index')}" for page in RESULTS.glob("*.md")]
    assert sorted(listed) == sorted(pages)


def test_the_index_links_every_page():
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in LINK.findall((DOCS / "index.md").read_text())}
    assert set(PAGES) - {DOCS / "index.md"} <= linked
    listed = {
        (RESULTS / link.partition("#")[0]).resolve() for link in LINK.findall((RESULTS / "README.md").read_text())
    }
    assert set(RESULTS.glob("*.md")) - {RESULTS / "README.md"} <= listed


def test_the_page_of_benchmarks_lists_every_program():
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    programs = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in file.read_text()
    ]
    assert len(programs) > 20
    assert [name for name in programs if name not in listed] == []


def test_the_list_of_data_has_every_file():
    listed = (RESULTS / "README.md").read_text()
    assert [file.name for file in (ROOT / "benchmarks/data").iterdir() if f"`{file.name}`" not in listed] == []


@for_each(EVERYTHING, name=named)
def test_named_files_of_the_repository_exist(page):
    for path in NAMED_FILE.findall(prose(page)):
        assert (ROOT / path).exists(), f"{path} is not there"


def test_the_diagrams_are_those_that_their_program_draws(tmp_path):
    subprocess.run([sys.executable, DOCS / "pictures.py", tmp_path], check=True, timeout=60)
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert drawn == {name: (DOCS / "images" / name).read_text() for name in ("estimate.svg", "job.svg")}


# Commands

COMMANDS = all_commands()


def command_lines(page):
    """The command lines that a page shows, with their line."""
    for language in ("bash", "console", "yaml"):
        for line, text, _ in blocks(page, language):
            for shown in text.replace("\\\n", " ").splitlines():
                if language != "console" or shown.startswith("$ "):
                    yield from ((line, part) for part in typed(shown))


def typed(shown):
    """The command lines of Ullage in a line of a shell, or of a workflow that has one."""
    plain = re.sub(r"^\s*(?:\$ |- run: |run: |entry: )?(?:\w+=\S+ )*", "", shown)
    return [part for part in re.split(r" && | \| |; | > ", plain) if part.startswith("ullage ")]


def find(words):
    """The command that words name, and the words after it."""
    command = COMMANDS
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@for_each(EVERYTHING, name=named)
def test_commands_that_are_shown_can_be_typed(page):
    for line, shown in command_lines(page):
        words = shlex.split(shown, comments=True)[1:]
        command, rest = find(words)
        assert command is not COMMANDS or rest[0].startswith("--"), f"line {line}: there is no command {words[0]!r}"
        if command is not COMMANDS:
            try:
                command.make_context(command.name, with_launcher_apart(command.name, rest))
            except Exception as error:
                message = getattr(error, "format_message", lambda error=error: repr(error))()
                pytest.fail(f"{named(page)}, line {line}: {shown}: {message}")


@for_each([page for page in EVERYTHING if page.name != "CHANGELOG.md"], name=named)  # it says what was typed then
def test_commands_in_the_text_exist_with_their_options(page):
    for shown in INLINE.findall(" ".join(prose(page).split())):
        command, rest = find(shown.split()[1:])
        if command is COMMANDS:
            assert rest[0].startswith("-") or rest[0].isupper(), f"`{shown}`: there is no such command"
        known = {name for item in command.params for name in (*item.opts, *item.secondary_opts)} | {"--help"}
        rest = with_launcher_apart(command.name, rest)
        own = rest[: rest.index("--")] if "--" in rest else rest
        for word in own:
            if word.startswith("-"):
                assert word.partition("=")[0] in known, f"`{shown}`: no option {word}"


PROGRAM = re.compile(
    r"(?:^[ \t]*(?:\$ )?(?:\w+=\S+ )*(?:\$\(BIN\)/)?python (?P<line>(?:benchmarks|docs|examples|tests)/\S+\.py.*)$)"
    r"|`python\s(?P<inline>(?:benchmarks|docs|examples|tests)/[\w/]+\.py[^`]*)`",
    re.MULTILINE,
)


def programs_shown(text):
    """The programs of the repository that a text calls, each with its words."""
    for shown in PROGRAM.finditer(text.replace("\\\n", " ")):
        called = re.split(r" && | \| |; | > ", " ".join((shown["line"] or shown["inline"]).split()))[0]
        program, *words = shlex.split(called, comments=True)
        yield program, words


def test_programs_that_are_shown_take_their_options():
    lines = {}
    for page in [*EVERYTHING, ROOT / "Makefile"]:
        if page.name != "CHANGELOG.md":  # it says what was typed then
            for program, words in programs_shown(page.read_text()):
                lines.setdefault(program, []).append(words)
    assert sum(map(len, lines.values())) > 60
    lines["benchmarks/accuracy/scripts.py"].append(["compare", "neither"])
    lines["benchmarks/no_such_program.py"] = [[]]
    command = [sys.executable, ROOT / "tests/docs/benchmark_options.py"]
    done = subprocess.run(command, input=json.dumps(lines), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    refused = json.loads(done.stdout)
    assert [line for line in refused if "neither" not in line and "no_such_program" not in line] == []
    assert len(refused) == 2, "what cannot be typed is refused"


@for_each(EVERYTHING, name=named)
def test_commands_stand_in_fenced_blocks(page):
    assert re.findall(r"^ {4,}(?:\$ )?(?:ullage|python|make) .*", prose(page), re.MULTILINE) == []


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in EVERYTHING:
        if page.name != "CHANGELOG.md":
            shown = re.findall(r"`make ([\w-]+)", prose(page))
            for _, text, _ in blocks(page, "bash"):
                shown += re.findall(r"^make ([\w-]+)", text, re.MULTILINE)
            assert set(shown) <= targets, named(page)


# Python

PUBLIC = {*ullage.__all__}
MODULES = ("ullage.manager", "ullage.manager.simulation", "ullage.estimation.estimators")  # with public names, too


@for_each([page for page in EVERYTHING if page.name != "CONTRIBUTING.md"], name=named)
def test_python_blocks_use_public_names_only(page):
    for line, text, _ in blocks(page, "python"):
        where = f"{named(page)}, line {line}"
        for node in ast.walk(ast.parse(text, where)):
            if isinstance(node, ast.Import):
                assert not [name.name for name in node.names if name.name.startswith("ullage.")], where
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ullage":
                assert node.module in ("ullage", *MODULES), f"{where}: {node.module} is private"
                assert {name.name for name in node.names} <= {*importlib.import_module(node.module).__all__}, where
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ullage":
                assert node.attr in PUBLIC, f"{where}: ullage.{node.attr} is not public"


def test_contributing_has_python_that_compiles():
    texts = [text for _, text, _ in blocks(ROOT / "CONTRIBUTING.md", "python")]
    assert texts
    for text in texts:
        ast.parse(text)


def test_marked_python_blocks_run(tmp_path):
    """All of them in one process, because importing PyTorch takes most of the time."""
    marked = [(page, line, text) for page in EVERYTHING for line, text, mark in blocks(page, "python") if mark == "run"]
    assert len(marked) >= 5
    program = tmp_path / "blocks.py"
    program.write_text(
        "".join(f"print({f'{named(page)}, line {line}'!r})\nexec({text!r}, {{}})\n" for page, line, text in marked)
    )
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


# Other blocks


@for_each(EVERYTHING, name=named)
def test_toml_blocks_parse_with_and_without_comments(page):
    for _, text, _ in blocks(page, "toml"):
        tomllib.loads(text)
        tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@for_each(EVERYTHING, name=named)
def test_extras_that_are_named_exist(page):
    for names in NAMED_EXTRA.findall(page.read_text()):
        assert set(names.split(",")) <= set(EXTRAS), names


def test_the_install_page_lists_packages_of_extras():
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (DOCS / "get-started/install.md").read_text(), re.MULTILINE))
    assert set(listed) == set(EXTRAS) - {"ci", "dev", "docs"}
    for extra, packages in listed.items():
        brought = {re.split(r"[>=\[]", package)[0].lower() for package in EXTRAS[extra]}
        assert {package.strip().lower() for package in packages.split(",")} == brought, extra


# Words


@for_each(EVERYTHING, name=named)
def test_internal_goals_stay_out(page):
    assert not re.search(r"\bgoals?\b", page.read_text(), re.IGNORECASE), "readers do not need internal goals"


@for_each(PAGES, name=named)
def test_private_modules_are_named_in_the_design_only(page):
    """The reference of Python says in which module of the project each public class stands."""
    if page.name not in ("design.md", "python.md"):
        named = re.findall(r"\bullage(?:\.[a-z_]+){2,}|src/ullage/", page.read_text())
        assert not [name for name in named if not {name, name.rpartition(".")[0]} & {*MODULES}]


def test_blocks_with_output_are_marked_for_recording():
    """A console block of a command that needs no server and no GPU is recorded by `docs/record.py`."""
    for page in [*PAGES, ROOT / "README.md"]:
        for line, text, mark in blocks(page, "console"):
            if re.search(r"^\$ ullage (estimate|check|max-batch|compare|share)", text, re.MULTILINE):
                assert mark == "record", f"{named(page)}, line {line}"
                assert len(text.splitlines()) > 1, f"{named(page)}, line {line}: not recorded yet"


def test_exactness_is_that_of_one_command():
    """README and the page on accuracy take their figures from the recorded output of `ullage evaluate`."""
    texts = [text for _, text, _ in blocks(RESULTS / "accuracy.md", "console")]
    shown = next(text for text in texts if "$ ullage evaluate --truth" in text)
    rows = re.findall(r"^all +(\w+) +306 +306 +(\S+) +(\S+) +\S+ +(\S+) +(\S+) +\S+$", shown, re.MULTILINE)
    assert [row[0] for row in rows] == ["allocated", "reserved", "process"]
    names = {"allocated": "`peak_allocated`", "reserved": "`peak_reserved`", "process": "`process_memory`"}
    table = [f"| {names[name]} | {' | '.join(figures)} |" for name, *figures in rows]
    holds, above = re.search(r"^upper holds for (\S+) of the runs and lies (\S+) above", shown, re.MULTILINE).groups()
    worst = re.search(r"^worst: .* reserved \+(\S+)$", shown, re.MULTILINE)[1]
    reserved = rows[1]
    for page in (ROOT / "README.md", DOCS / "explanation" / "accuracy.md"):
        text = " ".join(read(page).split())
        assert all(row in text for row in table), f"{named(page)}: {table}"
        assert f"holds for {holds} of the runs and lies {above} above" in text, named(page)
        assert f"{worst} too high" in text, named(page)
    assert f"exact to the byte for {reserved[1]} and within {reserved[3]} for nine of ten" in " ".join(
        read(ROOT / "README.md").split()
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", RECORDED, ids=named)
def test_recorded_commands_print_the_same_again(page, monkeypatch):
    """Times differ from run to run, and widths of columns with them. Blocks on a Slurm cluster stay as they are."""
    monkeypatch.syspath_prepend(str(DOCS))
    recording = importlib.import_module("record")
    text = page.read_text().replace("<!-- record on ", "<!-- on ")
    again = recording.record(text)
    assert [*lines_without_times(again)] == [*lines_without_times(text)]


def lines_without_times(text: str):
    """Yield each line of a page with its seconds and runs of blanks taken out."""
    for line in text.splitlines():
        yield " ".join(re.sub(r"\b[\d.]+ m?s\b", "TIME", line).split())


def test_every_promise_of_the_security_page_has_its_test():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", read(DOCS / "security.md"))
    assert len(named) > 30
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]
    assert not missing


def test_recording_a_page_that_is_not_there_is_one_line(tmp_path):
    command = [sys.executable, DOCS / "record.py", tmp_path / "nothing.md"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr == f"docs/record.py: there is no page {tmp_path}/nothing.md\n"
