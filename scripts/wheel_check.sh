#!/usr/bin/env bash
# Checks the x86-64 wheel as a new user installs it, in a root with only Debian's Python, without a compiler
# or a network: pip installs the wheel with its extras, and every example runs.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(ls "$PWD"/dist/*_x86_64.whl)
root=$PWD/build/new-user
extras=lightning,accelerate,transformers,torchft,ray
inside=(timeout 1800 scripts/in_root.sh "$root")

THINWIRE_WHEELS=$wheel .venv/bin/python -m pytest -q tests/wheel

# Every Debian has libstdc++6, because apt needs it; torch's wheel does not contain it.
scripts/debian_root.sh amd64 "$root" bash coreutils libstdc++6 python3-venv
for tool in cc gcc c++ g++ clang ld make cmake nvcc; do
  [[ ! -e $root/usr/bin/$tool ]] || { echo "$tool is in the clean root" >&2 && exit 1; }
done

# Downloads what pip would fetch, because the root has no network.
grep -hE '^(torch|numpy)==' requirements.txt >"$root/pins"
grep -hE "^(${extras//,/|})(\[\w+\])?==" tests/frameworks/{trainers,others}.txt >>"$root/pins"
.venv/bin/python -m pip download -q --disable-pip-version-check --only-binary :all: -d "$root/shelf" \
  -r "$root/pins" "$wheel[$extras]"
cp "$wheel" "$root/shelf/"
"${inside[@]}" python3 -m venv --clear /venv
"${inside[@]}" pip install -q --disable-pip-version-check --no-index --find-links /shelf "thinwire[$extras]"

rm -rf "$root/examples" && mkdir "$root/examples"
cp integrations/examples/*.py tests/wheel/own_libraries.py "$root/examples/"
"${inside[@]}" python /examples/own_libraries.py
"${inside[@]}" thinwire doctor

for example in integrations/examples/*.py; do
  name=${example##*/}
  program=/examples/$name
  case $name in
    ddp.py | fsdp2.py | replicate.py | plain_loop.py | accelerate_loop.py | hf_trainer.py)
      command=(torchrun --nproc-per-node 2 "$program") ;;
    train_accelerate.py | train_transformers.py)
      command=(torchrun --nproc-per-node 2 "$program" "/tmp/$name.out") ;;
    horovod_checkpoints.py) command=(torchrun --nproc-per-node 2 "$program" "/tmp/$name.out" --epochs 1) ;;
    horovod_digits.py) command=(torchrun --nproc-per-node 2 "$program" --epochs 1 --compression int4) ;;
    horovod_benchmark.py) command=(torchrun --nproc-per-node 2 "$program" --compression int4) ;;
    train_lightning.py | train_fabric.py | train_ray.py) command=(python "$program" "/tmp/$name.out") ;;
    recover.py | train_torchft.py | ray_executor.py | lightning_trainer.py | ray_train.py)
      command=(python "$program") ;;
    ray_servers.py | sites_private.py) continue ;; # they need libzmq and Opacus, which are not in the root
    *) echo "$name: this script does not know how to start it" >&2 && exit 1 ;;
  esac
  begin=$SECONDS
  "${inside[@]}" "${command[@]}" >"$root/examples/$name.log" 2>&1 || {
    cat "$root/examples/$name.log" >&2
    echo "$name failed" >&2
    exit 1
  }
  echo "$name, $((SECONDS - begin)) s: $(grep -E 'loss|images' "$root/examples/$name.log" | tail -1)"
done
echo "${wheel##*/} works in an empty root"
