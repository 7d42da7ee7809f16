"""A list of convolutions that no table and no tree was made from: drawn with another seed than what was measured.

    python benchmarks/held_out_convolutions.py --out tasks.json.gz
    ullage convolutions measure tasks.json.gz --out held_out.jsonl.gz  # needs a GPU

Half of the layers have any whole numbers as channels, half are like those of models. Each is drawn with a batch size, a
type and a layout, and is called forward and backward. The seed is no setting: a list that was looked at is used up.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from ullage.research.cudnn_tables.collect import arbitrary_configurations, random_layer
from ullage.research.cudnn_tables.tasks import (
    BACKWARD,
    FORWARD,
    LAYOUTS,
    TYPES,
    ConvolutionLayer,
    ConvolutionTask,
    native,
    tensor_bytes,
    write_tasks,
)

SEED = 20261115
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
MOST_BYTES = 400_000_000


def draw(count: int) -> list[tuple[ConvolutionLayer, int, int, int]]:
    """Layers with a batch size and the numbers of a type and a layout."""
    chance, found = random.Random(SEED), list(arbitrary_configurations(count // 2, SEED))
    while len(found) < count:
        layer, batch = random_layer(chance), chance.choice(BATCHES)
        kind, layout = chance.randrange(len(TYPES)), chance.choice((0, 0, 1))
        if min(layer.output()) < 1 or tensor_bytes(layer, batch, TYPES[kind]) > MOST_BYTES:
            continue
        if not native(layer, TYPES[kind], LAYOUTS[layout]):
            found.append((layer, batch, kind, layout))
    return found


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=400, help="configurations")
    given = parser.parse_args()
    drawn = draw(given.count)
    layers = list(dict.fromkeys(layer for layer, *_ in drawn))
    tasks = [
        ConvolutionTask(layers.index(layer), batch, kind, layout, direction)
        for layer, batch, kind, layout in drawn
        for direction in (FORWARD, BACKWARD)
    ]
    write_tasks(given.out, layers, tasks)
    print(f"{len(tasks)} calls of {len(layers)} layers: {given.out}")


if __name__ == "__main__":
    main()
