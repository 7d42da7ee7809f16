#!/bin/sh
# Install what tests need of Debian and is missing, as root: `tests/debian.sh chromium slurm systemd`. Says what it does.
# No service is started: tests start a Slurm of their own, and end it.
set -eu
missing=
for what in "$@"; do
    case $what in
        chromium) program=chromium packages=chromium ;;
        slurm) program=slurmctld packages="slurm-wlm slurm-client munge slurm-wlm-basic-plugins" ;;
        systemd) program=systemd-analyze packages=systemd ;;
        *) echo "$0 knows no $what" >&2 && exit 2 ;;
    esac
    PATH="$PATH:/usr/sbin" command -v $program >/dev/null || missing="$missing $packages"
done
[ -n "$missing" ] || exit 0
echo "installing$missing"
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq -o Acquire::Retries=3
apt-get install -y -qq -o Acquire::Retries=3 --no-install-recommends $missing >/dev/null
