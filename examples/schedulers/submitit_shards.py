"""Submit a function with submitit and request as many shards of a GPU as it needs.

    executor = submitit.AutoExecutor(folder="logs")
    job = submit(executor, train, 64, gpu="A100-40GB")

The function runs on a virtual GPU first, in this process. `ullage slurm watch` looks after the job, because its comment
says what was estimated.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import ullage

GIB = 1 << 30


def submit(executor: Any, function: Callable[..., Any], *args: Any, gpu: str, shard: int = GIB, **options: Any) -> Any:
    """Submit `function(*args, **options)` and return submitit's job; raise `ValueError` if it cannot fit on the GPU.

    `shard` is the size of one of the cluster's shards in bytes.
    """
    estimate = ullage.estimate(functools.partial(function, *args, **options), gpu=gpu)
    if not estimate.fits:
        raise ValueError(f"the function needs up to {estimate.bound / GIB:.1f} GiB and does not fit on {gpu}")
    shards = -(-estimate.bound // shard)
    comment = "ullage:" + json.dumps({"upper": estimate.bound, "shards": shards, "gpu": estimate.gpu})
    if executor.cluster == "slurm":
        wanted = {"gres": f"shard:{shards}", "comment": comment}
        executor.update_parameters(slurm_additional_parameters=wanted)
    return executor.submit(function, *args, **options)
