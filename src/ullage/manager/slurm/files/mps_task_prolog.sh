#!/bin/sh
# Ullage: a job with shards of a GPU uses its user's MPS, and gets no more memory than it asked for.
[ -n "$SLURM_SHARDS_ON_NODE" ] || exit 0
folder=@FOLDER@/$(id -u)
[ -d "$folder/pipe" ] || exit 0
echo "export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe"
echo "export CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=$((SLURM_SHARDS_ON_NODE * @SHARD_MIB@))M"
