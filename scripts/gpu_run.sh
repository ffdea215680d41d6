#!/usr/bin/env bash
# run.sh of the folder that `make gpu-pack` makes: runs all checks and benchmarks that need an NVIDIA GPU.
# Requires bash, coreutils, grep and a driver; uses torch, NCCL, compute-sanitizer, ncu and nvidia-smi if
# they are installed.
#
#   OUT=folder PYTHON=python3 ONLY="cpp speed nccl sanitize python" ./run.sh
#
# ONLY: the parts to run, by default all; they run in this order. Each takes nine minutes at most:
#   cpp       bytes of the kernels, graphs, allreduces of the engine
#   speed     figures of the kernels and their thresholds, clocks, counters of ncu
#   nccl      exchanges over the libnccl of torch
#   sanitize  the kernels under compute-sanitizer
#   python    DDP on the GPU
# BUDGET: seconds for all parts together, by default 540 for each part.
#
# Prints one table. A step fails if its command fails or times out, if it runs no test or skips one (no
# test may be skipped on a GPU), or if a figure misses its threshold. A step is `absent`, which is not a
# failure, if the machine lacks what it needs; but a torch built for CUDA that finds no libnccl is a failure.
# Results: table.txt, steps.json, log.txt, kernels.json and ncu.csv in $OUT. Exit 0: no step failed.
set -uo pipefail
pack=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$PWD/out}
python=${PYTHON:-python3}
known=(cpp speed nccl sanitize python)
read -ra parts <<<"${ONLY:-${known[*]}}"
for part in "${parts[@]}"; do
  [[ " ${known[*]} " == *" $part "* ]] || {
    echo "ONLY has '$part', expected some of: ${known[*]}" >&2
    exit 2
  }
done
end=$((SECONDS + ${BUDGET:-$((540 * ${#parts[@]}))}))
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
: >"$out/table.txt" >"$out/log.txt"
rows=()
failed=0

row() { # NAME RESULT SECONDS REMARK
  local remark=${4//[\"\\]/ }
  remark=${remark//[[:cntrl:]]/ }
  printf '%-19s %-7s %5s s  %s\n' "$1" "$2" "$3" "${remark:0:150}" | tee -a "$out/table.txt"
  rows+=("{\"step\": \"$1\", \"result\": \"$2\", \"seconds\": $3, \"remark\": \"$remark\"}")
  [[ $2 != failed ]] || failed=$((failed + 1))
}

absent() { row "$1" absent 0 "$2"; } # NAME WHY

finish() {
  local i comma=,
  {
    echo "["
    for i in "${!rows[@]}"; do
      ((i + 1 < ${#rows[@]})) || comma=
      echo " ${rows[i]}$comma"
    done
    echo "]"
  } >"$out/steps.json"
  if ((failed)); then
    echo "failed: $failed of ${#rows[@]} steps; see $out/log.txt" | tee -a "$out/table.txt"
    exit 1
  fi
  echo "no step failed" | tee -a "$out/table.txt"
  exit 0
}

# These functions check the output of each kind of step. They print a remark, and return 1 for a failure
# and 2 if the machine lacks something.
judge_gtest() {
  local skipped passed
  skipped=$(grep -c '^\[  SKIPPED \] .* (' "$1")
  passed=$(grep -oE '^\[  PASSED  \] [0-9]+' "$1" | grep -oE '[0-9]+$')
  if ((skipped)); then
    echo "$skipped skipped: $(grep -m1 -A1 ': Skipped$' "$1" | tail -n 1)"
    return 1
  fi
  echo "${passed:-0} tests"
  ((${passed:-0}))
}
judge_sanitizer() {
  judge_gtest "$1" || return 1
  grep -qE 'SUMMARY: 0 (errors|hazards)' "$1" || { echo "no clean summary of compute-sanitizer" && return 1; }
}
judge_pytest() {
  local summary
  summary=$(tail -n 1 "$1")
  echo "${summary//=/}"
  grep -qE '[0-9]+ passed' <<<"$summary" && ! grep -qE '(skipped|xfailed|xpassed|error)' <<<"$summary"
}
judge_bandwidth() {
  echo "$(grep -c ratio_to_twin "$out/kernels.json") rows in kernels.json"
  grep -q ratio_to_twin "$out/kernels.json"
}
# Fails if heat or the power supply slowed the GPU down: its figures then do not show the kernels' speed. A
# power cap is not a failure, since every full load reaches it.
judge_clocks() {
  local hot sm most
  sm=$(grep -m1 -E '^ +SM +: ' "$1")
  most=$(grep -A4 -E '^ +Max Clocks' "$1" | grep -m1 -E '^ +SM +: ')
  hot=$(grep -m1 -E '^ +(HW Slowdown|HW Thermal Slowdown|HW Power Brake Slowdown|SW Thermal Slowdown) +: Active' "$1")
  if [[ -n $hot ]]; then
    echo "slowed down: ${hot%%:*}"
    return 1
  fi
  echo "SM ${sm##*: }, at most ${most##*: }"
  [[ -n $sm ]]
}
judge_found() { # by nccl.py, which fails if torch has CUDA and no NCCL
  tail -n 1 "$1"
  [[ $(tail -n 1 "$1") != absent* ]] || return 2
}
# The most host time of an exchange beyond that of the library's own calls, in microseconds.
most_us=20
judge_exchange() {
  local last us
  last=$(grep -E '^plane beyond the library: ' "$1")
  echo "${last:-no figure}; at most $most_us us are expected"
  us=${last##*library: }
  us=${us%% us*}
  [[ $us =~ ^-?[0-9]+(\.[0-9]+)?$ ]] && (($(thousandths "$us") <= most_us * 1000))
}
judge_ncu() {
  local kernels
  if grep -q ERR_NVGPUCTRPERM "$1" "$out/ncu.csv"; then
    echo "the driver lets administrators alone read its counters"
    return 2
  fi
  kernels=$(grep -cE '^"[0-9]+"' "$out/ncu.csv")
  echo "$kernels kernels in ncu.csv"
  ((kernels >= 6))
}
thousandths() { # 1.1764 -> 1176; drops digits after the third
  local sign="" text=$1
  [[ $text != -* ]] || sign=- text=${text#-}
  local whole=${text%%.*} part=000
  [[ $text != *.* ]] || part=${text#*.}000
  echo "$sign$((10#${whole:-0} * 1000 + 10#${part:0:3}))"
}
decimal() { # 1176 -> 1.17
  local hundredths=$(($1 / 10))
  printf '%d.%02d' $((hundredths / 100)) $((hundredths % 100))
}
judge_plain() { tail -n 1 "$1"; }

# Appends the command's output to the log. A step passes only if its judge_ function returns 0.
step() { # NAME LIMIT KIND COMMAND...
  local name=$1 limit=$2 kind=$3 begin=$SECONDS left=$((end - SECONDS)) status remark
  local log=$out/$name.part
  shift 3
  if ((left < 1)); then
    row "$name" failed 0 "not run: the time of all steps is up"
    return 1
  fi
  ((limit < left)) || limit=$left
  timeout -k 5 "$limit" "$@" >"$log" 2>&1
  status=$?
  remark=$("judge_$kind" "$log")
  case $?/$status in
    0/0) status=passed ;;
    2/*) status=absent ;;
    */124 | */137) status=failed remark="did not end within $limit s; $(tail -n 1 "$log")" ;;
    1/0) status=failed ;;
    *) remark="exit $status; $(grep -E '^\[  FAILED  \]|^FAILED|^E  ' "$log" | head -n 1) $(tail -n 1 "$log")" status=failed ;;
  esac
  { echo "=== $name: $*" && cat "$log" && echo; } >>"$out/log.txt"
  rm -f "$log"
  row "$name" "$status" $((SECONDS - begin)) "$remark"
  [[ $status == passed ]]
}

# Programs use the machine's C library if it is new enough, else the pack's.
loader=()
choose_loader() {
  [[ -x $pack/lib/glibc/ld-linux-x86-64.so.2 ]] || return
  "$pack/bin/kernel_test" --gtest_list_tests >/dev/null 2>&1 && return
  loader=("$pack/lib/glibc/ld-linux-x86-64.so.2"
    --library-path "$pack/lib/glibc:$pack/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
}

all_programs_start() {
  local program whose="the machine"
  for program in kernel_test cuda_graph_test device_test kernel_bench; do
    if ! timeout 10 "${loader[@]}" "$pack/bin/$program" --help >"$out/log.txt" 2>&1; then
      row programs failed 0 "$program does not start: $(tail -n 1 "$out/log.txt")"
      return 1
    fi
  done
  ((${#loader[@]} == 0)) || whose="the pack"
  row programs passed 0 "all start, with the C library of $whose"
}

program() { # NAME LIMIT KIND PROGRAM ARGUMENT...
  local name=$1 limit=$2 kind=$3 path=$pack/bin/$4
  shift 4
  step "$name" "$limit" "$kind" "${loader[@]}" "$path" "$@"
}

# Prints the path of tool NAME, from PATH, CUDA's folder or that of Nsight Compute.
tool() {
  local IFS=: folders=(/usr/local/cuda/bin /opt/nvidia/nsight-compute/*)
  PATH=$PATH:${folders[*]} command -v "$1"
}

# Small tests of every kernel, because the sanitizer makes memory accesses a hundred times as slow.
part_sanitize() {
  local name sanitizer
  sanitizer=$(tool compute-sanitizer)
  for name in memcheck racecheck synccheck; do
    if [[ -z $sanitizer ]]; then
      absent "$name" "there is no compute-sanitizer"
      continue
    fi
    step "$name" 145 sanitizer "$sanitizer" --tool "$name" --error-exitcode 9 "${loader[@]}" \
      "$pack/bin/kernel_test" --gtest_filter='*EveryKernel*cuda:*ManyShards*cuda:*WithoutWire*cuda:*MomentumAround*cuda'
  done
}

part_cpp() {
  program parity 250 gtest kernel_test --gtest_filter='*cuda'
  program graph 60 gtest cuda_graph_test
  program engine 120 gtest device_test --gtest_filter='*cuda'
}

# The figures that must not get worse: operation/codec/bytes of fp32, the maximum of its time relative to
# its twin's, and the minimum of its rate relative to a copy's, both in thousandths. Most have 512 MiB: with
# 64 MiB events and launches take 3 to 5 % of the time. A twin moves the same bytes without computing; the
# twins of reduce8 and topk are copies.
large=$((512 << 20))
key_rows=(
  "encode_ef/int8/$large 1176 750" "encode_ef/int4/$large 1176 750" "encode_ef/onebit/$large 1176 750"
  "decode/int8/$large 1176 750" "decode/int4/$large 1176 750" "decode_add/int4/$large 1176 750"
  "reduce8/int8/$large 1333 750" "encode_ef/topk/$large 1350 0"
  "chunks_to_one/int4/$((4 << 20)) 1300 0"
)
# Three quarters of the data sheet's rate, in thousandths of TB/s: a GPU below it is shared, slowed down or
# another model.
declare -A least_copy=(["H100 80GB HBM3"]=2510 ["H200"]=3600 ["A100-SXM4-80GB"]=1520)

figure() { # LINE NAME: prints the figure in thousandths, or nothing if there is none
  [[ $1 =~ \"$2\":\ ([0-9]+(\.[0-9]+)?) ]] && thousandths "${BASH_REMATCH[1]}"
}

line_of() { grep -m1 -F "\"name\": \"$1\"" "$out/kernels.json"; }

copy_row() { # sets copy, in thousandths of TB/s
  local name device least=0 result=passed
  copy=$(figure "$(line_of "reduce8/int8/$large")" twin_terabytes_per_second)
  device=$(grep -m1 '"device"' "$out/kernels.json")
  for name in "${!least_copy[@]}"; do [[ $device != *"$name"* ]] || least=${least_copy[$name]}; done
  if ((${copy:-0} == 0)); then
    row copy failed 0 "kernels.json has no reduce8/int8/$large, whose twin is a copy"
    return
  fi
  ((copy >= least)) || result=failed
  row copy "$result" 0 "$(decimal "$copy") TB/s, expected $(decimal "$least") or more of this GPU"
}

key_row() { # NAME MOST_OF_TWIN LEAST_OF_COPY
  local name=${1%/*} line ratio rate share=0 result=passed expected
  line=$(line_of "$1")
  ratio=$(figure "$line" ratio_to_twin)
  rate=$(figure "$line" terabytes_per_second)
  if ((${ratio:-0} == 0 || ${rate:-0} == 0)); then
    row "$name" failed 0 "kernels.json has no figures of $1"
    return
  fi
  ((${copy:-0} == 0)) || share=$((1000 * rate / copy))
  ((ratio <= $2 && share >= $3)) || result=failed
  expected="$(decimal "$2") or less of the twin's time"
  (($3 == 0)) || expected+=", $(decimal "$3") or more of a copy"
  row "$name" "$result" 0 \
    "$(decimal "$rate") TB/s, $(decimal "$ratio") of the twin's time, $(decimal "$share") of a copy; expected $expected"
}

clocks() { # NAME
  local smi
  if ! smi=$(tool nvidia-smi); then
    absent "$1" "there is no nvidia-smi"
    return
  fi
  step "$1" 20 clocks "$smi" -q -d CLOCK,PERFORMANCE
}

part_speed() {
  local key name most least copy=0
  clocks clocks_before
  step bandwidth 240 bandwidth bash -c 'out=$1; shift; exec "$@" >"$out"' - "$out/kernels.json" \
    "${loader[@]}" "$pack/bin/kernel_bench"
  clocks clocks_after
  copy_row
  for key in "${key_rows[@]}"; do
    read -r name most least <<<"$key"
    key_row "$name" "$most" "$least"
  done
  profile
}

# Counters of a dozen kernels, each run several times, at the clocks of training.
profile() {
  local metrics=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
  local ncu
  metrics+=,smsp__issue_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread
  metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active,smsp__inst_executed.sum
  if ! ncu=$(tool ncu); then
    absent ncu "there is no ncu"
    return
  fi
  : >"$out/ncu.csv"
  step ncu 90 ncu "$ncu" --csv --page raw --clock-control none --metrics "$metrics" --log-file "$out/ncu.csv" \
    "${loader[@]}" "$pack/bin/kernel_bench" --profile
}

has_module() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>>"$out/log.txt"; }
pytest() { # NAME LIMIT ARGUMENT...
  step "$1" "$2" pytest "$python" -m pytest -q -rs -p no:cacheprovider --rootdir "$pack" "${@:3}"
}

# Checks only for torch; the tests themselves check for everything else.
tests=$pack/tests/integrations/python
prepare_python() { # NAME...: the steps that need torch
  local name
  if ! has_module torch; then
    for name in "$@"; do absent "$name" "$python has no torch"; done
    return 1
  fi
  export PYTHONPATH=$pack/python PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
  unset THINWIRE_LIBRARY
  has_module pytest || PYTHONPATH+=:$pack/site
}

# nccl_self: a rank sends to itself, with any NCCL. nccl: ranks share the GPU, which requires NCCL 2.30.
part_nccl() {
  local found=$out/nccl.txt version path name
  prepare_python nccl_find nccl_self nccl || return
  rm -f "$found"
  step nccl_find 60 found "$python" "$pack/nccl.py" "$found"
  if [[ ! -s $found ]]; then
    for name in nccl_self nccl; do
      case ${rows[-1]} in
        *'"absent"'*) absent "$name" "there is no NCCL: see nccl_find" ;;
        *) row "$name" failed 0 "not run: see nccl_find" ;;
      esac
    done
    return
  fi
  read -r version path <"$found"
  rm -f "$found"
  export THINWIRE_NCCL_LIB=$path
  program nccl_self 60 exchange nccl_bench --nccl "$path" --cuda libthinwire_cuda.so
  case $version in
    2.[0-9] | 2.[0-9].* | 2.[12][0-9] | 2.[12][0-9].*)
      absent nccl "expected NCCL 2.30 or newer, got: $version" ;;
    *) pytest nccl 240 "$tests/test_cuda_nccl.py" ;;
  esac
  unset THINWIRE_NCCL_LIB
}

part_python() {
  prepare_python ddp || return
  pytest ddp 400 -k cuda "$tests/test_cuda.py" "$tests/test_training_modes.py"
}

choose_loader
all_programs_start && program device 30 plain kernel_bench --device || finish
for part in "${known[@]}"; do [[ " ${parts[*]} " != *" $part "* ]] || "part_$part"; done
finish
