"""Writes an HTML page about a training: its scores, the confusion matrix, and the data in two dimensions."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue
from ullage.units import format_bytes
from ullage_lab.train.fitting import classes_of
from ullage_lab.train.protocol import Examples, Scores, Trained, confusion

# Pictures as SVG: a data set in two dimensions, and the confusion matrix of a classifier.

Points = npt.NDArray[np.float64]
MOST_POINTS = 1500
# Light for little memory, dark for much: five stops between which colours are mixed.
_STOPS = ((253, 231, 37), (94, 201, 98), (33, 145, 140), (59, 82, 139), (68, 1, 84))
_MARK = "<!--BODY-->"
_NAMES = {"mlp": "ensemble of perceptrons", "transformer": "Transformer over layers"}
_COLUMNS = ("accuracy", "precision", "recall", "f1", "f1_macro", "under", "over", "within_one")


def projected(totals: npt.NDArray[np.float32], how: str, seed: int) -> Points:
    """Project normalised features to two dimensions: "pca" (the directions of most variance) or "tsne" (neighbours)."""
    spread = totals.std(0)
    normal = (totals - totals.mean(0)) / np.where(spread > 1e-6, spread, 1.0)
    if how == "pca":
        from sklearn.decomposition import PCA

        return np.asarray(PCA(2, random_state=seed).fit_transform(normal), dtype=np.float64)
    from sklearn.manifold import TSNE

    near = min(30.0, (len(normal) - 1) / 3)
    return np.asarray(TSNE(2, perplexity=near, random_state=seed, init="pca").fit_transform(normal), dtype=np.float64)


def sampled(rows: int, seed: int, most: int = MOST_POINTS) -> npt.NDArray[np.int64]:
    """Return the rows to draw: all, or a sample of N."""
    if rows <= most:
        return np.arange(rows)
    return np.sort(np.random.default_rng(seed).choice(rows, most, replace=False))


def colour(share: float) -> str:
    """Return a colour between light (0) and dark (1).

    >>> colour(0.0), colour(1.0)
    ('#fde725', '#440154')
    """
    place = min(max(share, 0.0), 1.0) * (len(_STOPS) - 1)
    low = min(int(place), len(_STOPS) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(_STOPS[low], _STOPS[low + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def scatter(points: Points, classes: Sequence[int], width: int, label: str, size: int = 420) -> str:
    """Plot points in the colours of their memory classes, with a legend; `width` is the bytes of a class."""
    low, high = points.min(0), points.max(0)
    scale = np.where(high > low, high - low, 1.0)
    places = 16 + (points - low) / scale * (size - 32)
    names = sorted(set(classes))
    shares = {name: place / max(len(names) - 1, 1) for place, name in enumerate(names)}
    order = np.argsort(np.asarray(classes), kind="stable")
    dots = "".join(
        f'<circle cx="{places[row, 0]:.1f}" cy="{size - places[row, 1]:.1f}" r="2.4" '
        f'fill="{colour(shares[classes[row]])}" fill-opacity="0.75"/>'
        for row in order.tolist()
    )
    return (
        f'<svg viewBox="0 0 {size + 120} {size}" width="{size + 120}" height="{size}" role="img" '
        f'aria-label="{escape(label)}"><rect class="frame" x="1" y="1" width="{size - 2}" height="{size - 2}"/>{dots}'
        f"{_legend(names, shares, width, size)}</svg>"
    )


def _legend(names: list[int], shares: dict[int, float], width: int, left: int) -> str:
    """Return a legend with at most a dozen classes: first, last and some between."""
    step = -(-len(names) // 12)
    parts = []
    for line, name in enumerate(names[::step]):
        y = 20 + 18 * line
        parts.append(f'<circle cx="{left + 14}" cy="{y - 4}" r="5" fill="{colour(shares[name])}"/>')
        parts.append(f'<text x="{left + 24}" y="{y}">to {escape(format_bytes((name + 1) * width))}</text>')
    return "".join(parts)


def confusion_picture(names: Sequence[int], counts: Sequence[Sequence[int]], width: int) -> str:
    """Return the matrix: rows are true classes, columns predicted ones; numbers if they are legible.

    >>> confusion_picture([0, 1], [[5, 0], [1, 4]], 1 << 30).count("<rect")
    4
    """
    cell = max(10, min(34, 560 // max(len(names), 1)))
    left, top = 64, 34
    parts = []
    for y, line in enumerate(counts):
        total = max(sum(line), 1)
        for x, count in enumerate(line):
            kind = "hit" if x == y else "low" if x < y else "high"
            title = f"true {_range(names[y], width)}, told {_range(names[x], width)}: {count}"
            parts.append(
                f'<g class="{kind}"><title>{escape(title)}</title><rect x="{left + x * cell}" y="{top + y * cell}" '
                f'width="{cell - 1}" height="{cell - 1}" fill-opacity="{0.06 + 0.9 * count / total:.2f}"/>'
                + (_number(left + (x + 0.5) * cell, top + (y + 0.62) * cell, count) if count and cell >= 20 else "")
                + "</g>"
            )
    every = max(1, len(names) // 12)
    for place in range(0, len(names), every):
        edge = escape(format_bytes((names[place] + 1) * width))
        parts.append(f'<text x="{left - 6}" y="{top + (place + 0.7) * cell}" text-anchor="end">{edge}</text>')
    parts.append(
        f'<text x="{left}" y="20">true class by line, estimated class by column; below the diagonal: too low</text>'
    )
    side = cell * len(names)
    return (
        f'<svg viewBox="0 0 {max(left + side, 420) + 10} {top + side + 10}" width="{max(left + side, 420) + 10}" '
        f'height="{top + side + 10}" role="img" aria-label="confusion matrix">{"".join(parts)}</svg>'
    )


def _number(x: float, y: float, count: int) -> str:
    return f'<text class="count" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{count}</text>'


def _range(name: int, width: int) -> str:
    return f"{format_bytes(name * width)} to {format_bytes((name + 1) * width)}"


def write_report(result: Trained, examples: Examples, path: Path, *, tsne: bool = True) -> None:
    text = page(result, examples, tsne=tsne)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidValue(f"cannot write the report to {path}: {error.strerror}") from None


def page(result: Trained, examples: Examples, *, tsne: bool = True) -> str:
    template = files("ullage_lab.train").joinpath("report.html").read_text(encoding="utf-8")
    card = result.card
    conditions = (
        f"{card.rows} rows measured on {escape(card.gpu)}, {format_bytes(card.range[0])} to "
        f"{format_bytes(card.range[1])}; bins of {format_bytes(card.bin)}; {len(result.learn_rows)} rows to learn "
        f"from, {len(result.test_rows)} held out; seed {card.seed}"
    )
    network = _NAMES.get(card.estimator, card.estimator)
    parts = [
        f"<h1>gpumemnet: {escape(card.family)} data, {escape(network)}</h1><p>{conditions}</p>",
        _card("Scores", "scroll", _scores(result)),
        _card("Test part, true and told", "scroll", _confusion(result, examples)),
        _card("The data in two dimensions", "many", _data(result, examples, tsne)),
    ]
    return template.replace(_MARK, "\n".join(parts))


def _card(title: str, kind: str, content: str) -> str:
    return f'<div class="card"><h2>{title}</h2><div class="{kind}">{content}</div></div>'


def _scores(result: Trained) -> str:
    named = [(f"fold {number}", one) for number, one in enumerate(result.validation, 1)] + [("test", result.test)]
    heads = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in ("part", "rows", *_COLUMNS))
    rows = "".join(_line(name, one) for name, one in named)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _line(name: str, scores: Scores) -> str:
    cells = "".join(f"<td>{getattr(scores, column):.3f}</td>" for column in _COLUMNS)
    return f"<tr><td>{name}</td><td>{scores.rows}</td>{cells}</tr>"


def _confusion(result: Trained, examples: Examples) -> str:
    card = result.card
    true = classes_of(examples.memory[result.test_rows], card.bin, card.bins)
    names, counts = confusion(true.tolist(), result.predictions.tolist())
    return confusion_picture(names, counts, card.bin)


def _data(result: Trained, examples: Examples, tsne: bool) -> str:
    card = result.card
    chosen = sampled(len(examples), card.seed)
    totals = examples.jobs.totals.numpy()[chosen]
    classes = classes_of(examples.memory[chosen], card.bin, card.bins).tolist()
    drawn = []
    for how, title in (("pca", "PCA"), ("tsne", "t-SNE")):
        if how == "tsne" and not tsne:
            continue
        picture = scatter(projected(totals, how, card.seed), classes, card.bin, f"{title} of {len(chosen)} rows")
        drawn.append(f"<figure><figcaption>{title}, {len(chosen)} rows</figcaption>{picture}</figure>")
    return "".join(drawn)
