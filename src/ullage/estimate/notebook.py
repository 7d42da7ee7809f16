"""An estimate as a notebook shows it: one card of HTML that brings its own style and needs nothing else."""

from __future__ import annotations

from html import escape

from ullage.estimate.colours import BREAKDOWN_COLOURS
from ullage.estimate.result import BREAKDOWN_WORDS, Estimate
from ullage.units import format_bytes


def card(estimate: Estimate) -> str:
    """The card. Colours of the text are the notebook's own, so that it fits light and dark ones."""
    good = estimate.fits
    colour, word = ("#1a7f4b", "✓") if good else ("#c9372c", "✗")
    parts = [
        '<div style="max-width:760px;border:1px solid #8884;border-radius:10px;padding:12px 16px;line-height:1.45">',
        f"<div><b>{escape(estimate.source)}</b></div>" if estimate.source else "",
        f'<div style="font-weight:600;font-size:1.1em;color:{colour}">{word} {escape(estimate.verdict)}</div>',
        _bar(estimate),
        _table(estimate),
        f"<div>The peak is reached {escape(estimate.peak_words)}.</div>" if estimate.peak_words else "",
        f'<div style="opacity:.75">{escape(estimate.certainty[:1].upper() + estimate.certainty[1:])}. ',
        f"{escape(estimate.effort[:1].upper() + estimate.effort[1:])}.</div>",
        _notes(estimate),
        "</div>",
    ]
    return "".join(parts)


def _bar(estimate: Estimate) -> str:
    whole = max(estimate.gpu_memory, estimate.figure, 1)
    pieces = [
        f'<div title="{name}: {format_bytes(size)}" style="width:{100 * size / whole:.2f}%;'
        f'background:{BREAKDOWN_COLOURS[name]}"></div>'
        for name, size in estimate.breakdown.items()
        if size > 0
    ]
    style = "display:flex;height:14px;border-radius:7px;overflow:hidden;background:#8883;margin:8px 0"
    return f'<div style="{style}">{"".join(pieces)}</div>'


def _table(estimate: Estimate) -> str:
    rows = []
    for name, size in estimate.breakdown.items():
        swatch = f'<span style="color:{BREAKDOWN_COLOURS[name]}">■</span>'
        cell = "padding:1px 14px 1px 0;text-align:left;background:none"
        rows.append(
            f'<tr style="background:none"><td style="{cell}">{swatch} {name}</td>'
            f'<td style="{cell};text-align:right;font-variant-numeric:tabular-nums">{format_bytes(size)}</td>'
            f'<td style="{cell};opacity:.75">{BREAKDOWN_WORDS[name]}</td></tr>'
        )
    return f'<table style="border:0;border-collapse:collapse;margin:4px 0 8px">{"".join(rows)}</table>'


def _notes(estimate: Estimate) -> str:
    if not estimate.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in estimate.notes)
    return f"<details><summary>{len(estimate.notes)} assumptions</summary><ul>{items}</ul></details>"
