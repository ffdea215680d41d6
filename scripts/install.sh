#!/usr/bin/env bash
# install.sh PACKAGE...: installs those Debian packages that are missing.
set -euo pipefail

missing=()
for package in "$@"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok' || missing+=("$package")
done
((${#missing[@]})) || exit 0

if ! command -v apt-get >/dev/null; then
  echo "This machine has no apt-get. Please install the equivalents of: ${missing[*]}" >&2
  exit 1
fi
as_root=()
if ((EUID != 0)); then as_root=(sudo); fi
echo "installing ${missing[*]}"
exec 9<"$0"
flock 9  # apt fails at once if another apt is running
"${as_root[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends \
  "${missing[@]}" >/dev/null
