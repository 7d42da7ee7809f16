"""The time of a training step and how busy it keeps a GPU, alone and with other jobs.

The input is a step's calls (`step.StepCalls`, plain values), the output a `Utilization` or a `Sharing`. Nothing here
runs a job, uses the virtual GPU, or imports PyTorch.
"""
