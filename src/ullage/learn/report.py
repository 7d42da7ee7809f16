"""One HTML page about a training: its scores, the confusion matrix, and the data in two dimensions."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.learn.examples import Examples
from ullage.learn.pictures import confusion_picture, projected, sampled, scatter
from ullage.learn.protocol import Trained
from ullage.learn.scores import Scores, confusion
from ullage.learn.training import classes_of
from ullage.units import format_bytes

_MARK = "<!--BODY-->"
_COLUMNS = ("accuracy", "precision", "recall", "f1", "f1_macro", "under", "over", "within_one")


def write_report(result: Trained, examples: Examples, path: Path, *, tsne: bool = True) -> None:
    """Write the page.

    >>> write_report(result, examples, Path("out.html"))      # doctest: +SKIP
    """
    text = page(result, examples, tsne=tsne)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidValue(f"cannot write the report to {path}: {error.strerror}") from None


def page(result: Trained, examples: Examples, *, tsne: bool = True) -> str:
    """The page as text."""
    template = files("ullage.learn").joinpath("report.html").read_text(encoding="utf-8")
    card = result.card
    said = (
        f"{card.rows} rows measured on {escape(card.gpu)}, {format_bytes(card.range[0])} to "
        f"{format_bytes(card.range[1])}; bins of {format_bytes(card.bin)}; {len(result.learn_rows)} rows to learn "
        f"from, {len(result.test_rows)} held out; seed {card.seed}"
    )
    parts = [
        f"<h1>walknet: {escape(card.family)} data, {escape(_words(card.estimator))}</h1><p>{said}</p>",
        _card("Scores", "scroll", _scores(result)),
        _card("Test part, true and told", "scroll", _confusion(result, examples)),
        _card("The data in two dimensions", "many", _data(result, examples, tsne)),
    ]
    return template.replace(_MARK, "\n".join(parts))


def _card(title: str, kind: str, content: str) -> str:
    return f'<div class="card"><h2>{title}</h2><div class="{kind}">{content}</div></div>'


def _words(estimator: str) -> str:
    return {"mlp": "ensemble of perceptrons", "transformer": "Transformer over layers"}.get(estimator, estimator)


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
    names, counts = confusion(true.tolist(), result.told.tolist())
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
