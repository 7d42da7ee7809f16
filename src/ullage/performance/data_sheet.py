"""Figures missing from data sheets: the share of rates that kernels reach, launch costs, rates of unlisted cards.

Three models of time stand side by side, each fitted with its own figures: figures of one quantity differ because they
were fitted together with others. To change one means to fit its model again.

- *rates*: `performance/`, the time of a step on an idle host (`ullage lab train utilization`, calls and runs, H200).
- *launches*: `virtual/memory/launch_clock.py`, how far the GPU is behind its host. The times of all requests of 14
  trainings with FSDP1, alone on an H200 (benchmarks/results/many-ranks.md).
- *choices*: `virtual/compiler/inductor.py`, which of a few kernels Inductor selects. Not timed: only large differences
  count.
"""

import tomllib
from pathlib import Path

# The share of the data sheet's rates that kernels reach. The clock of launches divides the least time of the rates by a
# share of its own; its trainings had 0.75 to 1. With 0.85 of the data sheet, one would be 9.5% too low, not 0.4%.
RATES_SHARE = 0.8  # at best; it gives the least time, which trees multiply by a factor
LAUNCHES_SHARE_OF_LEAST_TIME = 0.85
CHOICES_SHARE = 0.6

SHORTEST_KERNEL_S = 1.2e-6  # rates

# Host time to launch a kernel. The rates have a time for each operator instead: 10.4 microseconds for operators that
# they do not name.
LAUNCHES_HOST_S = 15e-6  # by Python code in FSDP
CHOICES_HOST_S = 5e-6  # by code of the compiler

# From a launch to the beginning of its kernel on an idle GPU, as fitted with the rates.
LATENCY_S = 8e-6

# For cards without a rate in the catalogue.
UNKNOWN_TFLOPS = 20.0  # in float32; tensor cores get the float32 rate of the catalogue, if there is one
UNKNOWN_BANDWIDTH = 1000.0  # GB/s

# Watts of an H200 as measured: without a process, and with processes that do nothing. The intercepts of two fits are
# other figures, although they are near: 112.3 W in rates.safetensors (`Rates.idle_w`), to which busy shares of a step
# add, and 115 W in sharing.json (`SharingRules.idle_w`), which jobs that share a GPU draw once.
RESTING_W, WAITING_W = 78.0, 121.0
WAITING_SHARE = 0.25  # of a GPU's limit, at most

# The kernels behind operator calls, by the shares of a call's time; the file names its card and the program behind it.
KERNELS = tomllib.loads((Path(__file__).parent / "data" / "kernels-h200.toml").read_text(encoding="utf-8"))
