#!/bin/sh
# Puts into the folder $1, for the tests, what of Debian's packages is not on the path: prometheus, promtool, alertmanager
# and amtool, and Slurm with munge. Needs apt-get and no root (as root it also refreshes the list of packages). Without
# them the tests that need them are skipped and say so.
set -u
folder=$1
mkdir -p "$folder"
cd "$folder" || exit 0

# fetch PACKAGE...: download and unpack, without installing.
fetch() {
    # shellcheck disable=SC2086
    if ! apt-get download "$@" >/dev/null 2>&1; then
        [ "$(id -u)" = 0 ] && [ -z "${refreshed:-}" ] && apt-get update -qq >/dev/null 2>&1 && refreshed=yes
        apt-get download "$@" >/dev/null 2>&1 || { echo "$* could not be fetched: their tests are skipped" >&2; return; }
    fi
    for package in ./*.deb; do
        dpkg -x "$package" . && rm -f "$package"
    done
}

wanted=""
command -v prometheus >/dev/null && command -v promtool >/dev/null || wanted="prometheus"
command -v prometheus-alertmanager >/dev/null && command -v amtool >/dev/null || wanted="$wanted prometheus-alertmanager"
slurm=""
if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
    slurm="slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2"
    # Libraries that they need, where the system has none.
    for library in libhwloc.so.15:libhwloc15 libnuma.so.1:libnuma1 liblz4.so.1:liblz4-1 libjson-c.so.5:libjson-c5 \
        libyaml-0.so.2:libyaml-0-2 libdbus-1.so.3:libdbus-1-3 libreadline.so.8:libreadline8 libgcrypt.so.20:libgcrypt20; do
        ldconfig -p 2>/dev/null | grep -q "${library%%:*}" || slurm="$slurm ${library##*:}"
    done
fi
[ -z "$wanted$slurm" ] && exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "No apt-get here: tests that need $wanted $slurm are skipped" >&2
    exit 0
fi
# shellcheck disable=SC2086
[ -n "$wanted" ] && fetch $wanted
# shellcheck disable=SC2086
[ -n "$slurm" ] && fetch $slurm

# Debian's alertmanager looks for its templates in one place only, which root alone can fill.
templates=usr/share/prometheus/alertmanager
if [ -d "$templates" ] && [ ! -e "/$templates" ]; then
    mkdir -p "/${templates%/*}" 2>/dev/null && cp -r "$templates" "/$templates" 2>/dev/null ||
        echo "/$templates cannot be written: tests that start alertmanager are skipped" >&2
fi
