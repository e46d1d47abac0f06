#!/usr/bin/env bash
# Installs the system libraries that the transport wheels load and this machine lacks (all are Mooncake's).
set -euo pipefail

missing=()
while read -r library package; do
  ldconfig -p | grep -q -F "$library" || missing+=("$package")
done <<'LIBRARIES'
libibverbs.so.1 libibverbs1
libnuma.so.1 libnuma1
libcurl.so.4 libcurl4
LIBRARIES

[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "missing system libraries; install them with your package manager (Debian, Ubuntu: apt-get install ${missing[*]})" >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
