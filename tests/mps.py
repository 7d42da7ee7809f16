"""A control program of MPS that behaves like NVIDIA's as far as Ullage uses it."""

CONTROL = """#!/bin/sh
alive="$CUDA_MPS_PIPE_DIRECTORY/alive"
log="$CUDA_MPS_LOG_DIRECTORY/calls"
if [ "$1" = -d ]; then
    echo started >> "$log"
    touch "$alive"
    exit 0
fi
read -r order
[ -e "$alive" ] || { echo "Cannot find MPS control daemon process" >&2; exit 1; }
case "$order" in
    get_server_list) echo 4242 ;;
    quit) echo quit >> "$log"; rm "$alive" ;;
    *) echo "unknown $order" >> "$log" ;;
esac
"""
