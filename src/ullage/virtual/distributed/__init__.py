"""`torch.distributed` for one rank of many. No other rank runs: its answers are assumed to equal this rank's."""
