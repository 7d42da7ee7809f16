#!/bin/sh
# Ullage: starts NVIDIA's MPS for the user of a job with GPUs, if it does not run yet. Slurm runs this as root.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin  # Slurm sets none
CONTROL=@CONTROL@
[ -n "$SLURM_JOB_GPUS" ] && command -v "$CONTROL" >/dev/null || exit 0

folder=@FOLDER@/$SLURM_JOB_UID
mkdir -p "$folder/jobs"
install -d -m 0700 -o "$SLURM_JOB_UID" "$folder/pipe" "$folder/log"
export CUDA_MPS_PIPE_DIRECTORY="$folder/pipe" CUDA_MPS_LOG_DIRECTORY="$folder/log"
exec 9>"$folder/lock"
flock 9
: > "$folder/jobs/$SLURM_JOB_ID"
if ! echo get_server_list | runuser -u "$SLURM_JOB_USER" -- "$CONTROL" >/dev/null 2>&1 9>&-; then
    runuser -u "$SLURM_JOB_USER" -- "$CONTROL" -d >/dev/null 2>&1 9>&-
fi
exit 0
