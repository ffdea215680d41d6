#!/usr/bin/env bash
# Checks the pack of `make gpu-pack` in two otherwise empty roots: one with a shell and its C library, and
# one with a static shell and no C library. In both the pack's programs must start, and run.sh must end
# with the message that there is no GPU. Requires root, or user namespaces.
set -euo pipefail
cd "$(dirname "$0")/.."
pack=$PWD/build/gpu-pack
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
tools=(bash env timeout grep tail head cat mkdir tee rm dirname)
namespace=(unshare --mount)
((EUID == 0)) || namespace+=(--map-root-user)

with_libraries() { # ROOT PROGRAM: copies the program's libraries to the same paths in ROOT
  ldd "$2" | sed -nE 's|^\t(.* => )?(/[^ ]+) \(.*|\2|p' | while read -r library; do
    install -D "$(realpath "$library")" "$1$library"
  done
}

plain_root() { # a shell, its tools, and their libraries
  local tool libc
  mkdir -p "$1/bin" "$1/usr" && ln -s ../bin "$1/usr/bin"
  for tool in "${tools[@]}"; do
    cp -L "$(type -P "$tool")" "$1/bin/"
    with_libraries "$1" "$(type -P "$tool")"
  done
  # A second file of the C library, which none of these tools needs.
  libc=$(ldd "$(type -P bash)" | sed -nE 's|.* => (/.*)/libc\.so\.6 .*|\1|p')
  install "$(realpath "$libc/libm.so.6")" "$1$libc/libm.so.6"
  ln -s bash "$1/bin/sh"
}

static_root() { # only static programs
  local tool
  (cd "$room" && apt-get download -qq bash-static busybox-static 2>/dev/null)
  mkdir -p "$1/bin" "$1/usr" && ln -s ../bin "$1/usr/bin"
  for package in "$room"/*.deb; do dpkg -x "$package" "$room/static"; done
  cp "$room/static/bin/bash-static" "$1/bin/bash"
  cp "$room/static/bin/busybox" "$1/bin/"
  for tool in "${tools[@]:1}" sh; do ln -s busybox "$1/bin/$tool"; done
}

check() { # ROOT EXPECTED
  local table
  mkdir -p "$1/dev" "$1/tmp" "$1/proc" && : >"$1/dev/null" && chmod 666 "$1/dev/null"
  cp -r "$pack" "$1/pack"
  # The loader finds a program's folder through /proc.
  table=$("${namespace[@]}" bash -c 'mount --rbind /proc "$0/proc" &&
    exec chroot "$0" /bin/bash -c "cd /tmp && PATH=/bin OUT=/tmp/out /pack/run.sh"' "$1") && {
    echo "run.sh passed without a GPU:" "$table" && exit 1
  }
  echo "$table"
  [[ $table == *"programs "*"passed"*"C library of the $2"*"device "*"failed"*"no GPU can be used here"* ]] || {
    echo "expected that programs start with the C library of the $2, and then no GPU" && exit 1
  }
}

plain_root "$room/plain" && check "$room/plain" machine
static_root "$room/without" && check "$room/without" pack
echo "the pack starts in an empty root, with and without a C library"
