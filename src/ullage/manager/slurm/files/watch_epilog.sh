#!/bin/sh
# Slurm's Epilog for 'ullage slurm watch': keeps the end of what a failed job printed, where the watcher finds it.
# It reads with the rights of the job's user, and it never fails: a failing epilog would drain the node.
spool='@SPOOL@'
case "$SLURM_JOB_COMMENT" in *ullage:*) ;; *) exit 0 ;; esac
[ "${SLURM_JOB_EXIT_CODE:-1}" != 0 ] || exit 0
shown=$(timeout 10 scontrol --oneliner show job "$SLURM_JOB_ID") || exit 0
place="$spool/ended/$SLURM_JOB_ID.${SLURM_JOB_RESTART_COUNT:-0}.$SLURMD_NODENAME"
mkdir -p "$spool/ended" && chmod 700 "$spool/ended" || exit 0
umask 077
number=0
out=$(printf '%s\n' "$shown" | sed -n 's/.* StdOut=\(.*\) Power=.*/\1/p')
err=$(printf '%s\n' "$shown" | sed -n 's/.* StdErr=\(.*\) StdIn=.*/\1/p')
[ "$out" != "$err" ] || err=
for path in "$out" "$err"; do
    [ -n "$path" ] && [ "$path" != /dev/null ] || continue
    number=$((number + 1))
    timeout 10 setpriv --reuid="$SLURM_JOB_UID" --regid="$SLURM_JOB_GID" --clear-groups \
        sh -c '[ -f "$1" ] && stat -c "%s %Y" "$1" && tail -c 65536 "$1"' keep "$path" > "$place.new" 2> /dev/null &&
        mv "$place.new" "$place.$number"
    rm -f "$place.new"
done
exit 0
