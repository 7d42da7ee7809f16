"""Convolutions drawn at random, what cuDNN answers about them, and the trees that are grown on the answers."""
