"""Readings of GPUs and hosts: from NVML, GPM and DCGM, of MIG instances, host processes and virtual cards.

with Monitor(best_source()) as monitor:
    for device in monitor.devices():
        print(device.name, monitor.window(device.id).mean("smact"))
"""
