"""Draw the diagrams of the explanations: `python docs/pictures.py [FOLDER]`, by default into docs/images."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "images"
BOX, GAP, EDGE = 168, 24, 16  # width of a column, the space between two, and the margin of the picture
STYLE = """
.back { fill: #ffffff; } text { fill: #1f2933; font: 12px system-ui, sans-serif; } .title { font-weight: 600; }
.box { fill: #f5f7fa; stroke: #7b8794; } .daemon { fill: #e8f1fe; stroke: #1f6feb; }
.user { fill: #fdf0e4; stroke: #c2570c; }
.arrow { stroke: #52606d; fill: none; stroke-width: 1.5; } .head { fill: #52606d; }
@media (prefers-color-scheme: dark) {
  .back { fill: #1e2129; } text { fill: #e2e4e9; } .box { fill: #2a2e37; stroke: #9aa5b1; }
  .daemon { fill: #1b2a41; stroke: #6cb6ff; } .user { fill: #3a2a1d; stroke: #f0883e; }
  .arrow { stroke: #9aa5b1; } .head { fill: #9aa5b1; }
}
"""
HEAD = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
ESTIMATE = (
    "From code to an estimate: a virtual GPU, the plans of operator calls, the allocator's model and the step time"
)
MANAGER = "A job from its submission to its end: database, placement, estimate, attempt, supervisor, exit record"


@dataclass(frozen=True)
class Box:
    """A box in a column, with its title and lines of text."""

    column: int
    top: int
    height: int
    title: str
    lines: tuple[str, ...]
    kind: str = "box"

    @property
    def left(self) -> int:
        return EDGE + self.column * (BOX + GAP)

    def draw(self) -> str:
        """Return the rectangle and its text, which is centred vertically."""
        x, first = self.left + 10, self.top + (self.height - 16 * len(self.lines)) / 2 + 4
        texts = [f'<text class="title" x="{x}" y="{first:g}">{escape(self.title)}</text>']
        texts += [f'<text x="{x}" y="{first + 16 * n:g}">{escape(line)}</text>' for n, line in enumerate(self.lines, 1)]
        shape = (
            f'<rect class="{self.kind}" x="{self.left}" y="{self.top}" width="{BOX}" height="{self.height}" rx="6"/>'
        )
        return shape + "".join(texts)


def across(start: Box, end: Box) -> str:
    """Return an arrow between neighbouring columns, at the height of the lower of the two boxes."""
    smaller = min(start, end, key=lambda box: box.height)
    y = smaller.top + smaller.height / 2
    if start.column < end.column:
        return arrow(start.left + BOX, y, end.left, y)
    return arrow(start.left, y, end.left + BOX, y)


def along(start: Box, end: Box) -> str:
    """Return an arrow between two boxes of the same column."""
    x = start.left + BOX / 2
    if start.top < end.top:
        return arrow(x, start.top + start.height, x, end.top)
    return arrow(x, start.top, x, end.top + end.height)


def arrow(*points: float) -> str:
    """Return an arrow from the first point to the second."""
    x, y, to_x, to_y = points
    return f'<path class="arrow" d="M{x:g} {y:g}L{to_x:g} {to_y:g}" marker-end="url(#head)"/>'


def picture(label: str, height: int, parts: list[str]) -> str:
    """Return an SVG of these parts, which is readable in light and dark mode."""
    width = 2 * EDGE + 5 * BOX + 4 * GAP
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    )
    head = f'<defs>{HEAD}<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
    back = f'<rect class="back" width="{width}" height="{height}" rx="6"/>'
    inside = "\n".join([f"<style>{STYLE}</style>", head, back, *parts])
    return f'{opening} role="img" aria-label="{escape(label)}">{inside}</svg>\n'


def estimate() -> str:
    """Return the way from code to an estimate."""
    code = Box(0, 98, 176, "Your code", ("a model by its name,", "a function,", "or an unmodified script"), "user")
    seen = (
        "PyTorch runs the code;",
        "tensors have shapes,",
        "but no data. A loop",
        "ends when its",
        "requests repeat.",
    )
    virtual = Box(1, 98, 176, "Virtual GPU", seen)
    rules = Box(2, 16, 56, "Rules, table, network", ("for kernels and cuDNN",))
    catalogue = Box(3, 16, 56, "Catalogue", ("memory and context",))
    plan = Box(2, 98, 76, "Plan of each call", ("outputs, temporaries,", "in the kernel's order"))
    allocator = Box(3, 98, 76, "Caching allocator", ("exact model: segments,", "blocks, cached memory"))
    calls = Box(2, 198, 76, "Calls of one step", ("shapes, streams,", "waits, collectives"))
    step = Box(3, 198, 76, "Step-time model", ("GPU and host,", "launch by launch"))
    trees = Box(3, 300, 56, "Regression trees", ("fitted on an H200",))
    figures = (
        "peak reserved memory",
        "+ context",
        "= process memory",
        "upper bound",
        "step time, activity",
        "assumptions",
    )
    result = Box(4, 98, 176, "Estimate", figures, "daemon")
    boxes = [code, virtual, rules, catalogue, plan, allocator, calls, step, trees, result]
    pairs = [(code, virtual), (virtual, plan), (virtual, calls), (plan, allocator), (calls, step)]
    arrows = [across(*pair) for pair in [*pairs, (allocator, result), (step, result)]]
    arrows += [along(*pair) for pair in [(rules, plan), (catalogue, allocator), (trees, step)]]
    return picture(ESTIMATE, 372, [*(box.draw() for box in boxes), *arrows])


def manager() -> str:
    """Return the way of a job through the manager."""
    submit = Box(0, 16, 76, "ullage submit", ("command, folder,", "environment"), "user")
    stored = Box(1, 16, 76, "Database", ("committed before", "the answer"), "daemon")
    placement = Box(2, 16, 76, "Queue, placement", ("policy, ledger, readings:", "which job, which GPU"), "daemon")
    attempt = Box(3, 16, 76, "Attempt", ("promise and attempt", "are committed"), "daemon")
    supervisor = Box(4, 16, 76, "Supervisor", ("holds the lock; limits,", "signals, output"))
    job = Box(4, 172, 76, "Job", ("on its GPU,", "with its user's rights"), "user")
    record = Box(3, 172, 76, "Exit record", ("exit.json, synced, also", "without a daemon"))
    cause = Box(2, 172, 76, "End and cause", ("are committed; the", "promise is released"), "daemon")
    over = Box(1, 172, 76, "Over", ("history, usage,", "notifications"), "daemon")
    estimated = Box(0, 172, 76, "Estimate", ("in the user's sandbox;", "upper bound = promise"), "user")
    way = [submit, stored, placement, attempt, supervisor, job, record, cause, over]
    arrows = [across(*pair) for pair in zip(way, way[1:], strict=False) if pair != (supervisor, job)]
    arrows += [along(supervisor, job), along(submit, estimated), along(cause, placement)]
    start, y, end = estimated.left + 0.75 * BOX, 132, placement.left + 0.25 * BOX
    promise = f'<text x="{start + 10:g}" y="{y - 8}">the promise, while the job waits or runs</text>'
    promise += f'<path class="arrow" d="M{start:g} {estimated.top}V{y}H{end:g}V92" marker-end="url(#head)"/>'
    retry = f'<text x="{cause.left + BOX / 2 + 10:g}" y="{y + 4}">retry, with more memory if it ran out</text>'
    return picture(MANAGER, 264, [*(box.draw() for box in [*way, estimated]), *arrows, promise, retry])


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else IMAGES
    (folder / "estimate.svg").write_text(estimate())
    (folder / "job.svg").write_text(manager())


if __name__ == "__main__":
    main()
