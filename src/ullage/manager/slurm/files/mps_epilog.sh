#!/bin/sh
# Ullage: ends NVIDIA's MPS of a user with the last of their jobs on this node. Slurm runs this as root.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin  # Slurm sets none
CONTROL=@CONTROL@
folder=@FOLDER@/$SLURM_JOB_UID
[ -e "$folder/jobs/$SLURM_JOB_ID" ] || exit 0

export CUDA_MPS_PIPE_DIRECTORY="$folder/pipe" CUDA_MPS_LOG_DIRECTORY="$folder/log"
exec 9>"$folder/lock"
flock 9
rm -f "$folder/jobs/$SLURM_JOB_ID"
if [ -z "$(ls -A "$folder/jobs")" ]; then
    echo quit | timeout 20 runuser -u "$SLURM_JOB_USER" -- "$CONTROL" >/dev/null 2>&1 9>&-
fi
exit 0
