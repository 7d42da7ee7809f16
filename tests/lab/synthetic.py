"""Made-up rows for tests: perceptrons whose memory follows from their sizes, with a little noise."""

import json
import math
import random
from typing import Any

from ullage_lab.estimators.fast.estimator import closed_bytes, parts_of

GIB = 1 << 30


def rows(count: int, seed: int = 1, family: str = "mlp", scale: float = 1.0) -> list[dict[str, Any]]:
    """Rows as `ullage dataset clean` writes them; memory is 0.75 GiB and 1.1 times what the closed formula says."""
    chance = random.Random(seed)
    return [row(number, chance, family, scale) for number in range(count)]


def row(number: int, chance: random.Random, family: str, scale: float) -> dict[str, Any]:
    batch, width, depth = chance.randint(8, 512), chance.randint(256, 6000), chance.randint(2, 8)
    layers, parameters, before = [], 0, width
    for _ in range(depth):
        after = chance.randint(256, 6000)
        own = before * after + after
        layers.append({"type": "linear", "activations": after, "parameters": own})
        layers.append({"type": "relu", "activations": after, "parameters": 0})
        parameters, before = parameters + own, after
    found: dict[str, Any] = {
        "id": f"{family}-{number}",
        "family": family,
        "configuration": json.dumps({"number": number, "seed": family}),
        "batch_size": batch,
        "input_elements": width,
        "sequence_length": None,
        "parameters": parameters,
        "activations": sum(layer["activations"] for layer in layers),
        "depth": depth,
        "count_linear": depth,
        "activation_function": "relu",
        "optimizer": chance.choice(["adam", "sgd"]),
        "precision": chance.choice(["fp32", "bf16"]),
        "layers": layers,
        "gpu": "H200",
        "torch": "2.11.0",
    }
    closed = closed_bytes(parts_of(found))
    reserved = closed * scale * 1.1 * math.exp(chance.gauss(0, 0.005))
    return found | {"peak_reserved": int(reserved), "process_memory": int(reserved + 0.75 * GIB)}
