"""Ullage's answers inside a Slurm cluster: how many shards of a GPU a job asks for. Slurm alone places and runs jobs.

Slurm counts shares of a GPU (`gres/shard`). With one shard a GiB it places by memory, if it is told how much.
"""
