"""Policies of one's own, as docs/how-to/write-a-policy.md writes them step by step.

ullage simulate --generate 200 --load 2 --seeds 20 --gpus 4xA100-40GB --policy magm,my_policy.py:choose
"""

ENOUGH = 0.15  # of what a job does alone: so much a further one has to add
PATIENCE = 3600  # seconds after which a job takes any GPU with room


def like_magm(job, gpus, now):
    """The GPU with the most memory free."""
    return sorted(gpus, key=lambda gpu: gpu.free, reverse=True)


like_magm.backfills = False
like_magm.predicts = False


def gain(gpu, job):
    """How much more work is done on the GPU with the job; 1.0 is what a job does alone."""
    after, before = gpu.speeds(job), gpu.speeds()
    if after is None or before is None:  # the work of one of the jobs is unknown
        return 1.0 if gpu.idle else 0.5
    return sum(after) - sum(before)


def choose(job, gpus, now):
    """The GPU on which the job adds most; none where it adds too little."""
    gains = {gpu: gain(gpu, job) for gpu in gpus}
    wanted = 0.0 if now - job.queued > PATIENCE else ENOUGH / job.gpus
    worth = [gpu for gpu in gpus if gains[gpu] >= wanted]
    return sorted(worth, key=lambda gpu: (round(gains[gpu], 1), gpu.free), reverse=True)


choose.predicts = False
