"""Trainings of one rank of many, as the lines of `ranks_h200*.jsonl.gz` describe them."""
