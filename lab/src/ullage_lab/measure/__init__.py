"""Measures drawn lists on a real GPU: memory, utilisation, times of calls and steps, jobs that share the GPU.

The input is lines of JSON, the output the same lines with measurements. A process here forks hundreds of children and
must stay small.
"""
