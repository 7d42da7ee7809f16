"""One job of `manager_trace.py`: trains a model for a number of steps with data from the host, as scripts do.

python benchmarks/trace_job.py torchvision:resnet50 --batch-size 64 --steps 100
"""

from __future__ import annotations

import argparse

from ullage.workloads import Configuration, train


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
    configuration = Configuration.from_options(
        options.model,
        batch_size=options.batch_size,
        input_shape=options.input_shape,
        sequence_length=options.sequence_length,
        precision=options.precision,
        optimizer=options.optimizer,
    )
    done = []
    train(configuration, options.steps, after_iteration=lambda: done.append(None))
    print(f"{len(done)} steps of {options.model}")


if __name__ == "__main__":
    main()
