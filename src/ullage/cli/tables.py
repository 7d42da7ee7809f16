"""Plain tables that fit the terminal: if it is narrow, less important columns are dropped, with a note."""

import shutil
import textwrap
from collections.abc import Sequence


def fitted(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    give_way: Sequence[str] = (),
    left: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """Return a table. `give_way` lists the columns to drop if there is no room, in this order.

    The first column and those in `left` are left-aligned. Without a terminal, a line has 80 characters unless the
    variable COLUMNS is set.
    """
    width = width or shutil.get_terminal_size().columns
    sizes = [max(map(text_width, column)) for column in zip(heads, *rows, strict=True)]
    shown = list(range(len(heads)))
    missing = []
    for name in give_way:
        if sum(sizes[place] + 2 for place in shown) - 2 > width:
            shown.remove(list(heads).index(name))
            missing.append(name)
    widths = [sizes[place] for place in shown]
    right = [place > 0 and heads[place] not in left for place in shown]
    lines = [aligned([cells[place] for place in shown], widths, right).rstrip() for cells in (heads, *rows)]
    note = f"(no room for {', '.join(missing)}; --json has all)" if missing else ""
    return "\n".join([*lines, *textwrap.wrap(note, width)])


def aligned(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    parts = []
    for cell, size, at_the_right in zip(cells, widths, right, strict=True):
        blank = " " * (size - text_width(cell))
        parts.append(blank + cell if at_the_right else cell + blank)
    return "  ".join(parts)


def text_width(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
