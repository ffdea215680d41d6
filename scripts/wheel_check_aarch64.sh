#!/usr/bin/env bash
# Checks the aarch64 wheel, by qemu, in a root with only Debian's arm64 Python: its library loads, every
# codec gives the same bytes as in the x86-64 wheel, and two ranks of a C program connect over Gloo.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(ls "$PWD"/dist/*_aarch64.whl) native=$(ls "$PWD"/dist/*_x86_64.whl)
root=$PWD/build-aarch64/clean
emulated=(timeout 600 scripts/in_root.sh "$root" /qemu)

THINWIRE_WHEELS=$wheel .venv/bin/python -m pytest -q tests/wheel

scripts/debian_root.sh arm64 "$root" libstdc++6 python3
install "$(type -P qemu-aarch64-static)" "$root/qemu"
rm -rf "$root"/{site,native,meeting} && mkdir "$root/meeting"
python3 -m zipfile -e "$wheel" "$root/site"
python3 -m zipfile -e "$native" "$root/native"
cp tests/wheel/*.py "$root/"

in_python=("${emulated[@]}" -E PYTHONPATH=/site /usr/bin/python3.11)
"${in_python[@]}" /own_libraries.py
"${in_python[@]}" /codec_digests.py >"$root/digests"
env -u THINWIRE_LIBRARY PYTHONPATH="$root/native" python3 tests/wheel/codec_digests.py | diff - "$root/digests"
echo "$(wc -l <"$root/digests") codecs have the bytes of x86-64"

install build-wheel-aarch64/integrations/c/c_example "$root/c_example"
cat >"$root/ranks.py" <<'PY'
import subprocess
ranks = [subprocess.Popen(["/qemu", "-E", "LD_LIBRARY_PATH=/site/thinwire/lib", "/c_example", str(rank), "2", "/meeting"])
         for rank in range(2)]
assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
PY
"${emulated[@]}" /usr/bin/python3.11 /ranks.py
echo "${wheel##*/} works under qemu"
