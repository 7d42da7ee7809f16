"""Virtual cards that several processes share: their jobs compete for memory as on a real GPU.

`cards.py` never imports PyTorch. `startup/` is put on a job's PYTHONPATH, which makes its "cuda" such a card.
"""
