"""Run drawn lists on a real GPU: memory, utilisation, times of calls and steps, jobs that share the card.

In come lines of JSON, out come the same lines with what was measured. A process here forks hundreds of children and has
to stay small.
"""
