#!/usr/bin/env bash
# debian_root.sh ARCHITECTURE FOLDER PACKAGE...: Debian packages of amd64 or arm64, with all that they
# depend on, unpacked into FOLDER. Nothing is installed here, and no maintainer's script runs, which
# libraries and Python do without. What is there already is not asked for again.
set -euo pipefail
architecture=$1 root=$2
shift 2
wanted="$architecture $*"
[[ "$(cat "$root/.packages" 2>/dev/null)" == "$wanted" ]] && exit 0

rm -rf "$root"
# Debian's usr-merge: packages that still name /lib find it here.
mkdir -p "$root/usr/"{bin,sbin,lib,lib64} && for name in bin sbin lib lib64; do ln -s "usr/$name" "$root/$name"; done
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state"/{lists,cache}/partial
: >"$state/status"
# An apt of its own, to which nothing is installed yet: it names every dependency.
apt=(apt-get -qq --no-install-recommends -o "APT::Architecture=$architecture" -o "APT::Architectures=$architecture"
  -o "Dir::State::lists=$state/lists" -o "Dir::State::status=$state/status" -o "Dir::Cache::archives=$state/cache"
  -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
"${apt[@]}" update
"${apt[@]}" -y --download-only install "$@" >/dev/null
for package in "$state"/cache/*.deb; do dpkg-deb --fsys-tarfile "$package" | tar x -C "$root" --keep-directory-symlink; done
echo "$wanted" >"$root/.packages"
