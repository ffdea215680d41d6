#!/usr/bin/env bash
# debian_root.sh ARCHITECTURE FOLDER PACKAGE...: unpacks Debian packages of amd64 or arm64, with all their
# dependencies, into FOLDER. Installs nothing on this machine and runs no maintainer's script, which
# libraries and Python do not need. Does nothing if FOLDER already has these packages.
set -euo pipefail
architecture=$1 root=$2
shift 2
wanted="$architecture $*"
[[ "$(cat "$root/.packages" 2>/dev/null)" == "$wanted" ]] && exit 0

rm -rf "$root"
# Debian's usr-merge, for packages that still use /lib.
mkdir -p "$root/usr/"{bin,sbin,lib,lib64} && for name in bin sbin lib lib64; do ln -s "usr/$name" "$root/$name"; done
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state"/{lists,cache}/partial
: >"$state/status"
# A separate apt state in which nothing is installed, so that apt downloads every dependency.
apt=(apt-get -qq --no-install-recommends -o "APT::Architecture=$architecture" -o "APT::Architectures=$architecture"
  -o "Dir::State::lists=$state/lists" -o "Dir::State::status=$state/status" -o "Dir::Cache::archives=$state/cache"
  -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
"${apt[@]}" update
"${apt[@]}" -y --download-only install "$@" >/dev/null
for package in "$state"/cache/*.deb; do dpkg-deb --fsys-tarfile "$package" | tar x -C "$root" --keep-directory-symlink; done
echo "$wanted" >"$root/.packages"
