"""What MkDocs runs while it builds the site: generated reference pages, and links that leave `docs/`.

Pages link to other files of the repository by relative paths, so that they work where the repository is browsed. In the
site, `benchmarks/results` and `lab/docs` become sections of their own, and other files become links to the repository.
Nothing here imports PyTorch.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {"results": "benchmarks/results", "lab": "lab/docs"}  # folders of the site that are outside of docs/

_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_FROM_THE_NETWORK = re.compile(r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+rel="stylesheet"[^>]+href="https?:')


# The hooks, by the names that MkDocs looks for.


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the sections outside of `docs/`."""
    from mkdocs.structure.files import File

    for section, folder in SECTIONS.items():
        for source in sorted((ROOT / folder).glob("*.md")):
            name = "index.md" if source.name == "README.md" else source.name
            files.append(File.generated(config, f"{section}/{name}", abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in what is generated, and turn links to files of the repository into links that the site has."""
    filled = _GENERATED.sub(lambda found: GENERATORS[found[1]](), markdown)
    return _LINK.sub(
        lambda found: found[1] + site_link(found[2], page.file.src_uri, config.extra["repository"]) + found[3], filled
    )


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that would load anything from the network."""
    found = _FROM_THE_NETWORK.search(output)
    if found:
        raise ValueError(f"{page.file.src_uri} loads from the network: {found[0]}")
    return output


# Links


def site_link(target: str, page: str, repository: str) -> str:
    """Return the target of a link on a page (by its path in the site): a page, or a file of the repository.

    >>> site_link("../../benchmarks/results/accuracy.md", "explanation/accuracy.md", "https://example.org/")
    '../results/accuracy.md'
    >>> site_link("../../docs/explanation/accuracy.md", "results/accuracy.md", "https://example.org/")
    '../explanation/accuracy.md'
    >>> site_link("../../LICENSE", "how-to/ci.md", "https://example.org/")
    'https://example.org/blob/main/LICENSE'
    """
    if re.match(r"[a-z]+:", target):
        return target
    in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(_path_in_repository(page)), target))
    in_site = _path_in_site(in_repository)
    if in_site is not None:
        return posixpath.relpath(in_site, posixpath.dirname(page) or ".")
    kind = "tree" if (ROOT / in_repository).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{in_repository}"


def _path_in_repository(page: str) -> str:
    section, _, name = page.partition("/")
    if section in SECTIONS:
        return f"{SECTIONS[section]}/{'README.md' if name == 'index.md' else name}"
    return f"docs/{page}"


def _path_in_site(path: str) -> str | None:
    for section, folder in SECTIONS.items():
        if path in (folder, f"{folder}/README.md"):
            return f"{section}/index.md"
        if path.startswith(f"{folder}/") and path.endswith(".md"):
            return f"{section}/{path.removeprefix(f'{folder}/')}"
    return path.removeprefix("docs/") if path.startswith("docs/") else None


# Generated pages


def commands() -> str:
    """The reference of every command, from the command line's own definitions."""
    from ullage.cli import all_commands

    root = all_commands()
    return "\n\n".join(_command(command, name) for name, command in _walk(root, "ullage"))


def _walk(command: Any, name: str) -> list[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    found = [] if name == "ullage" else [(name, command)]
    for word, sub in inner.items():
        if not sub.hidden:
            found += _walk(sub, f"{name} {word}")
    return found


def _command(command: Any, name: str) -> str:
    arguments = [item for item in command.params if not item.opts[0].startswith("-")]
    options = [item for item in command.params if item.opts[0].startswith("-") and not item.hidden]
    parts = [f"{'###' if name.count(' ') > 1 else '##'} {name}"]
    words = [name, *(["[OPTIONS]"] if options else []), *map(_argument, arguments)]
    words += ["COMMAND"] if getattr(command, "commands", None) else []
    parts += [f"```text\n{' '.join(words)}\n```", _help(command.help or "")]
    if arguments:
        rows = [f"| `{_cell(_argument(item))}` | {_cell(item.help)} |" for item in arguments]
        parts.append("| argument | meaning |\n| --- | --- |\n" + "\n".join(rows))
    panels: dict[str | None, list[Any]] = {}
    for item in options:
        panels.setdefault(item.rich_help_panel, []).append(item)
    for panel, items in panels.items():
        rows = [f"| {_names(item)} | {_cell(item.help)} | {_default(item)} |" for item in items]
        head = f"**{panel}**\n\n" if panel else ""
        parts.append(f"{head}| option | meaning | default |\n| --- | --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _argument(item: Any) -> str:
    word = item.metavar or item.name.upper()
    word += "..." if item.nargs == -1 and not word.endswith("...") else ""
    return word if item.required else f"[{word}]"


def _names(item: Any) -> str:
    value = "" if item.is_flag else " " + (item.metavar or item.name.upper())
    names = [f"`{option}{value}`" for option in sorted(item.opts, key=len, reverse=True)]
    return ", ".join(names + [f"`{option}`" for option in item.secondary_opts]).replace("|", "\\|")


def _default(item: Any) -> str:
    if item.required:
        return "required"
    nothing = item.default in (None, "", False) or item.default == []
    return "" if nothing else f"`{item.default}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _help(text: str) -> str:
    """Help as Markdown: indented lines are commands to type."""
    lines = inspect.cleandoc(text).splitlines()
    out: list[str] = []
    for line in lines:
        typed = line.startswith("  ") and line.strip()
        if typed:
            if out and out[-1] == "":
                out.pop()
            out += [line.strip()] if _inside(out) else ["", "```bash", line.strip()]
        else:
            out += ["```"] if _inside(out) and line else []
            out.append(line)
    return "\n".join([*out, "```"] if _inside(out) else out)


def _inside(lines: list[str]) -> bool:
    return sum(line.startswith("```") for line in lines) % 2 == 1


def gpus() -> str:
    """The catalogue of GPUs as a table."""
    import ullage

    rows = []
    for one in ullage.gpus():
        gpu = ullage.gpu(one) if isinstance(one, str) else one
        capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "unknown"
        sms = gpu.sms if gpu.sms is not None else "unknown"
        usable = f"{gpu.usable / 2**30:.1f} GiB"
        measured = "yes" if gpu.context_measured else "no"
        rows.append(f"| `{gpu.name}` | {gpu.memory / 2**30:.1f} GiB | {usable} | {sms} | {capability} | {measured} |")
    head = "| name | memory | usable by PyTorch | SMs | compute capability | measured |\n" + "| --- " * 6 + "|\n"
    return head + "\n".join(rows)


def known_workloads() -> str:
    """The known workloads of the simulator as a table."""
    from ullage.manager.simulation.known import MEASURED_ON, known_workloads

    rows = []
    for known in known_workloads().values():
        alone = known.kind.alone[MEASURED_ON]
        sizes = [f"{known.kind.memory / 2**30:.1f}", f"{(known.kind.estimates['ullage'] or 0) / 2**30:.1f}"]
        epochs = ", ".join(map(str, known.epochs))
        cells = [f"`{known.name}`", known.size, str(known.gpus), *sizes, f"{known.epoch_s / 60:.1f}", epochs]
        rows.append(" | ".join([*cells, f"{100 * alone.smact:.0f}%", f"{alone.power_w:.0f}"]))
    heads = ["name", "size", "GPUs", "memory, GiB", "by Ullage", "epoch, min", "epochs", "SMACT", "W"]
    return "\n".join(f"| {line} |" for line in [" | ".join(heads), " | ".join(["---"] * len(heads)), *rows])


GENERATORS = {"commands": commands, "gpus": gpus, "known_workloads": known_workloads}
