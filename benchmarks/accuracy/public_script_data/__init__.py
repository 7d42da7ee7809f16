"""Small random data for the public scripts, in the places and forms in which the scripts read theirs, by subject."""

from pathlib import Path

from . import audio, graphs, shapes, tables, text, vision
from .maker import Maker

# One generator of random numbers serves all, so that a new part belongs at the end: what is before stays the same.
PARTS = (
    vision.mnist,
    vision.image_folders,
    vision.coco,
    text.text,
    text.models,
    graphs.graphs,
    tables.tables,
    vision.small_pictures,
    vision.cifar,
    text.more_text,
    tables.pairs,
    vision.small_images,
    text.books,
    text.talks,
    shapes.points,
    text.small_models,
    text.news,
    tables.speeds,
    vision.black_and_white,
    graphs.small_graphs,
    shapes.scene,
    vision.skins,
    vision.paintings,
    tables.traffic,
    vision.alphabets,
    shapes.clouds,
    vision.style,
    audio.sounds,
    tables.sessions,
    vision.scenes,
    vision.high_resolution,
    vision.pretrained,
)


def make_data(root: Path) -> None:
    """Everything that the scripts below `root/src` read, about 1.3 GB in all: mostly pictures and weights."""
    maker = Maker(root)
    (maker.src / "pytorch+examples/vae/results").mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        part(maker)
