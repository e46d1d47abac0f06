#!/usr/bin/env bash
# Installs the system libraries that the transport wheels load and this machine lacks (Mooncake: libibverbs1).
set -euo pipefail
missing=()
ldconfig -p | grep -q 'libibverbs\.so\.1' || missing+=(libibverbs1)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "missing system libraries: ${missing[*]}. Install them with your package manager (Debian: apt-get install ${missing[*]})." >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
