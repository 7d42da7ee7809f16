"""`torch.distributed` for one rank of many: groups, collectives, objects, and the order of communication.

No other rank runs: its answers are assumed to equal this rank's.
"""
