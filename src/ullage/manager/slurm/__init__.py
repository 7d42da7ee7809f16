"""Ullage's estimates inside a Slurm cluster: sizes a job's request in shards of a GPU. Slurm places and runs jobs.

Slurm counts shares of a GPU (`gres/shard`). With one shard per GiB, it places by memory.
"""
