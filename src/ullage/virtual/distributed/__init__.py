"""`torch.distributed` for one rank of many: groups, collectives, objects that are sent, and the order among ranks.

No other rank runs: what it would answer is assumed to be what this one has.
"""
