"""How long an estimate as one rank of many takes, beside one rank, and what a very large model takes.

    python benchmarks/speed/ranks_speed.py [--repeat N] [--large]

Processor seconds (user and system) of estimates in one process, one after the other in turns; the best of `--repeat`,
since other programs can only add to them. One estimate of each comes before, and does not count: it imports.

`--large` follows a Llama of 70 billion parameters with FSDP2 on 64 GPUs in a process of its own, and tells its
processor seconds and the most memory that it held.
"""

import argparse
import resource
import subprocess
import sys
import time

import ullage

LAYERS, RANKS = 12, (1, 64)
SMALL = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
LARGE = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def seconds(parallel: str, ranks: int) -> float:
    """Processor seconds of one estimate."""
    begin = time.process_time()
    ullage.estimate(
        "hf:LlamaForCausalLM", set=SMALL, batch_size=2, sequence_length=512, gpu="H100", world_size=ranks,
        nodes=max(1, ranks // 8), parallel=parallel,
    )  # fmt: skip
    return time.process_time() - begin


def compare(repeat: int) -> None:
    """Print the best times, and how many times as long 64 ranks take."""
    print("| spread | 1 rank, s | 64 ranks, s | times |")
    print("| --- | --- | --- | --- |")
    for parallel in ("ddp", "fsdp2"):
        for ranks in RANKS:
            seconds(parallel, ranks)
        found = [[seconds(parallel, ranks) for ranks in RANKS] for _ in range(repeat)]
        one, many = (min(column) for column in zip(*found, strict=True))
        print(f"| {parallel} | {one:.2f} | {many:.2f} | {many / one:.2f} |", flush=True)


def large() -> None:
    """Print what a very large model took."""
    words = [word for key, value in LARGE.items() for word in ("--set", f"{key}={value}")]
    command = [
        sys.executable, "-m", "ullage", "estimate", "hf:LlamaForCausalLM", *words, "-b", "1", "--sequence-length",
        "4096", "-p", "bf16", "--checkpointing", "--world-size", "64", "--nodes", "8", "--parallel", "fsdp2", "--gpu",
        "H100",
    ]  # fmt: skip
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(next(line for line in done.stdout.splitlines() if "H100" in line))
    clock = time.perf_counter() - begin
    print(f"{used.ru_utime + used.ru_stime:.0f} processor seconds, {clock:.0f} on the clock")
    print(f"at most {used.ru_maxrss / 1024**2:.2f} GiB of memory")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    if options.large:
        large()
    else:
        compare(options.repeat)


if __name__ == "__main__":
    main()
