"""Other schedulers that ask a daemon of Ullage (`POST /v1/estimates`) how much GPU memory a job takes.

`skypilot` picks the smallest GPU that fits, `kubernetes` fills in the GPU memory of pods, `submitit` the shards of
jobs. None of them is imported by the rest of Ullage.
"""
