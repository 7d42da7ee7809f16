"""DNNPerf (Gao et al. 2023): a graph network that reads the computation graph of a training step.

It is trained by `ullage train dnnperf`.
"""
