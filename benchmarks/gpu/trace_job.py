"""One job of `manager_trace.py`: trains a model for a number of steps with data from the host, as scripts do.

    python benchmarks/gpu/trace_job.py torchvision:resnet50 --batch-size 64 --steps 100

It prints one JSON object: the seconds since 1970 at which Python had begun, PyTorch was there, the GPU had the first
step behind it, and the last one; and the most memory that PyTorch held.
"""

from __future__ import annotations

import time

BEGAN = time.time()

import argparse  # noqa: E402  the time before PyTorch is imported is told too
import json  # noqa: E402

import torch  # noqa: E402

from ullage.jobs import Model, train  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--input-shape", type=lambda text: [int(side) for side in text.split(",")])
    parser.add_argument("--sequence-length", type=int)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--optimizer", default="adam")
    options = parser.parse_args()
    configuration = Model(
        options.model,
        batch_size=options.batch_size,
        input_shape=options.input_shape,
        sequence_length=options.sequence_length,
        precision=options.precision,
        optimizer=options.optimizer,
    )
    told: dict[str, float] = {"began": BEGAN, "imported": time.time(), "steps": 0}

    def after_iteration() -> None:
        told["steps"] += 1
        if told["steps"] in (1, options.steps):
            torch.cuda.synchronize()
            told["first_step" if told["steps"] == 1 else "last_step"] = time.time()

    train(configuration, options.steps, after_iteration=after_iteration)
    print(json.dumps({**told, "reserved": torch.cuda.max_memory_reserved()}))


if __name__ == "__main__":
    main()
