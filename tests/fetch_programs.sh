#!/bin/sh
# Puts Debian's prometheus, promtool, alertmanager and amtool into the folder $1 for the tests, where they are not on the
# path. Needs apt-get and no root (as root it also refreshes the list of packages). Without them the tests that need
# them are skipped and say so.
set -u
folder=$1
mkdir -p "$folder"
wanted=""
command -v prometheus >/dev/null && command -v promtool >/dev/null || wanted="prometheus"
command -v prometheus-alertmanager >/dev/null && command -v amtool >/dev/null || wanted="$wanted prometheus-alertmanager"
[ -z "$wanted" ] && exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "No apt-get here: tests that need$([ -n "$wanted" ] && echo " $wanted") are skipped" >&2
    exit 0
fi
cd "$folder" || exit 0
# shellcheck disable=SC2086
if ! apt-get download $wanted >/dev/null 2>&1; then
    [ "$(id -u)" = 0 ] && apt-get update -qq >/dev/null 2>&1
    apt-get download $wanted >/dev/null 2>&1 || { echo "$wanted could not be fetched: their tests are skipped" >&2; exit 0; }
fi
for package in ./*.deb; do
    dpkg -x "$package" . && rm -f "$package"
done
# Debian's alertmanager looks for its templates in one place only, which root alone can fill.
templates=usr/share/prometheus/alertmanager
if [ -d "$templates" ] && [ ! -e "/$templates" ]; then
    mkdir -p "/${templates%/*}" 2>/dev/null && cp -r "$templates" "/$templates" 2>/dev/null ||
        echo "/$templates cannot be written: tests that start alertmanager are skipped" >&2
fi
