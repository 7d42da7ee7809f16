"""Random training scripts as people write them, by what they use: a module for each kind, put together from `parts`."""
