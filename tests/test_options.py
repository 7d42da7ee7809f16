"""The options of all commands together: one name has one meaning, a letter has one name, and the help is complete."""

import re
from collections import defaultdict

from tests.loops import for_each
from typer.testing import CliRunner

from ullage.cli import all_commands, app
from ullage.jobs.job_files import JobSpec

ROOT = all_commands()


def walk(command, path=()):
    """Every command that does something, by the words that name it."""
    inner = getattr(command, "commands", {})
    for name, found in inner.items():
        yield from walk(found, (*path, name))
    if not inner:
        yield " ".join(path), command


COMMANDS = dict(walk(ROOT))
OPTIONS = [
    (path, option)
    for path, command in COMMANDS.items()
    for option in command.params
    if option.param_type_name == "option" and not option.hidden
]
LONG = defaultdict(list)
for _path, _option in OPTIONS:
    for _name in _option.opts:
        if _name.startswith("--"):
            LONG[_name].append((_path, _option))


def kind(option):
    """What an option takes: nothing, or what its metavar says, without a file's suffix."""
    return "nothing" if option.is_flag else re.sub(r"^FILE\..*", "FILE", option.metavar or "?")


@for_each(sorted(LONG))
def test_an_option_takes_the_same_in_all_commands(name):
    kinds = {path: kind(option) for path, option in LONG[name]}
    assert "?" not in kinds.values(), f"{name} has no metavar: {kinds}"
    if name == "--out":  # a fit is several files
        assert set(kinds.values()) == {"FILE", "FOLDER"}
    elif name == "--gpus":  # how many a job needs, and which there are
        assert set(kinds.values()) == {"N", "GPUS"}
    else:
        assert len(set(kinds.values())) == 1, kinds


@for_each(sorted(LONG))
def test_an_option_has_the_same_letter_in_all_commands(name):
    letters = {path: [each for each in option.opts if not each.startswith("--")] for path, option in LONG[name]}
    assert len({tuple(each) for each in letters.values()}) == 1, letters


def test_a_letter_stands_for_one_option():
    meanings = defaultdict(set)
    for _, option in OPTIONS:
        letters = [each for each in option.opts if not each.startswith("--")]
        for letter in letters:
            meanings[letter] |= set(option.opts) - set(letters)
    assert {letter: names for letter, names in meanings.items() if len(names) > 1} == {}


def test_every_option_and_argument_says_what_it_means():
    for path, command in COMMANDS.items():
        for item in command.params:
            assert item.hidden or (item.help or "").endswith("."), f"ullage {path}: {item.opts} has no help"


def test_the_api_describes_a_job_as_the_command_line_does():
    described = {name: each.get("description") for name, each in JobSpec.model_json_schema()["properties"].items()}
    helps = {option.name: option.help for path, option in OPTIONS if path == "submit" and option.name in described}
    assert len(helps) > 20 and helps.pop("env")
    assert helps == {name: described[name] for name in helps}


@for_each(COMMANDS)
def test_help_texts_have_an_example_and_no_python_types(path):
    shown = CliRunner().invoke(app, [*path.split(), "--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output
    assert re.search(r"Examples?:\s*\n\s*\n?\s+ullage " + re.escape(path) + r"\b", shown), shown
    assert not re.search(r"<(bool|str|int|float|path|list)|\b(INTEGER|FLOAT)\b", shown), shown
