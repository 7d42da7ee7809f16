"""What a job is: configurations of training runs and the loop that trains them."""

from ullage.workload.configuration import Configuration, read_rows
from ullage.workload.training import build, train

__all__ = ["Configuration", "build", "read_rows", "train"]
