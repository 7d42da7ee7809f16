"""Sources of models: torchvision, timm, transformers, or a factory of your own.

`build.py` turns a configuration into a model and its task; each other module handles one source.
"""
