"""A virtual card that several processes share: one small file for each card, locked while it is read or changed.

`cards.py` never imports PyTorch. `startup/` is put on a job's PYTHONPATH so that its "cuda" is such a card.
"""
