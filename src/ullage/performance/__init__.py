"""How long a training step takes and how busy it keeps a GPU, alone and beside other jobs.

In comes a step's calls (`step.StepCalls`, plain values), out a `Utilization` or a `Sharing`. Nothing here runs a job,
knows the virtual GPU, or imports PyTorch.
"""
