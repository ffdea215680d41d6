#!/usr/bin/env bash
# ssh.sh FOLDER COMMAND...: COMMAND beside a real ssh server, in namespaces of their own, where they have the
# network and /etc, and end with the command. THINWIRE_TEST_SSH logs in there, at the hosts "other" and "far". Needs
# root.
set -euo pipefail
folder=$1
shift
mkdir -p -m 700 "$folder/home/.ssh"
ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
cp "$folder/key.pub" "$folder/home/.ssh/authorized_keys"
dropbearkey -t ed25519 -f "$folder/host_key" >/dev/null
awk -F: -v OFS=: -v home="$folder/home" '$1 == "root" { $6 = home } 1' /etc/passwd >"$folder/passwd"
echo "127.0.0.1 localhost $(hostname) other far" >"$folder/hosts"
cat >"$folder/login" <<LOGIN
#!/bin/sh
exec ssh -i $folder/key -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR \
  "\$1" "export ON_HOST=\$1; \$2"
LOGIN
chmod +x "$folder/login"
export THINWIRE_TEST_SSH=$folder/login
exec unshare --net --mount --pid --fork --kill-child --mount-proc bash -c '
  ip link set lo up
  mount --bind "$0/passwd" /etc/passwd
  mount --bind "$0/hosts" /etc/hosts
  dropbear -F -E -r "$0/host_key" -p 127.0.0.1:22 2>"$0/log" &
  until (: >/dev/tcp/127.0.0.1/22) 2>/dev/null; do sleep 0.1; done
  "$@" || exit' "$folder" "$@"
