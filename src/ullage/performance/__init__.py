"""The time of a training step, and how busy it keeps a GPU, from the step's calls as plain values; without PyTorch."""
