#!/usr/bin/env bash
# run.sh of the folder that `make gpu-pack` makes: everything that needs an NVIDIA GPU, within eight
# minutes. It needs bash, coreutils, grep and a driver; torch, compute-sanitizer, ncu and NCCL are used
# if they are there.
#
#   OUT=folder PYTHON=python3 BUDGET=480 ./run.sh
#
# Prints one table. A step fails if its command does, if its time is up, if it runs no test, or if it
# skips one: on a GPU nothing is left to skip. `absent` is what the machine lacks, and no failure.
# Results: table.txt, steps.json, log.txt, kernels.json and ncu.csv in $OUT. Exit 0: no step failed.
set -uo pipefail
pack=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$PWD/out}
python=${PYTHON:-python3}
end=$((SECONDS + ${BUDGET:-480}))
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
: >"$out/table.txt" >"$out/log.txt"
rows=()
failed=0

row() { # NAME RESULT SECONDS REMARK
  local remark=${4//[\"\\]/ }
  remark=${remark//[[:cntrl:]]/ }
  printf '%-12s %-7s %5s s  %s\n' "$1" "$2" "$3" "${remark:0:150}" | tee -a "$out/table.txt"
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

# What each kind of step must have written. They print a remark; status 1 is a failure, and 2 says that
# the machine lacks something.
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
judge_plain() { tail -n 1 "$1"; }

# The command's output goes to the log; only a step that is judged well has passed.
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

# Programs run on the machine's own C library where that is new enough, else on the pack's.
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
    if ! timeout 20 "${loader[@]}" "$pack/bin/$program" --help >"$out/log.txt" 2>&1; then
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

# Small tests of every kernel; each access of memory costs a hundred times as much as without.
sanitizers() {
  local tool sanitizer
  sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer)
  for tool in memcheck racecheck synccheck; do
    if [[ -z $sanitizer ]]; then
      absent "$tool" "there is no compute-sanitizer"
      continue
    fi
    step "$tool" 75 sanitizer "$sanitizer" --tool "$tool" --error-exitcode 9 "${loader[@]}" \
      "$pack/bin/kernel_test" --gtest_filter='*EveryKernel*cuda:*ManyShards*cuda:*WithoutWire*cuda:*MomentumAround*cuda'
  done
}

bandwidth() {
  step bandwidth 120 bandwidth bash -c 'out=$1; shift; exec "$@" >"$out"' - "$out/kernels.json" \
    "${loader[@]}" "$pack/bin/kernel_bench"
}

# Counters of six kernels, each of which runs several times.
profile() {
  local metrics=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
  local ncu
  metrics+=,smsp__issue_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread
  metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active,smsp__inst_executed.sum
  if ! ncu=$(PATH=$PATH:/usr/local/cuda/bin command -v ncu); then
    absent ncu "there is no ncu"
    return
  fi
  : >"$out/ncu.csv"
  step ncu 60 ncu "$ncu" --csv --page raw --metrics "$metrics" --log-file "$out/ncu.csv" \
    "${loader[@]}" "$pack/bin/kernel_bench" --profile
}

has_module() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>>"$out/log.txt"; }
pytest() { # NAME LIMIT ARGUMENT...
  step "$1" "$2" pytest "$python" -m pytest -q -rs -p no:cacheprovider --rootdir "$pack" "${@:3}"
}

# torch is asked for here, and everything else by the tests themselves.
with_torch() {
  local tests=$pack/tests/integrations/python version
  if ! has_module torch; then
    absent ddp "$python has no torch"
    absent nccl_self "$python has no torch"
    absent nccl "$python has no torch"
    return
  fi
  export PYTHONPATH=$pack/python PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
  unset THINWIRE_LIBRARY
  has_module pytest || PYTHONPATH+=:$pack/site
  pytest ddp 180 -k cuda "$tests/test_cuda.py" "$tests/test_training_modes.py"

  # A rank that sends to itself; and several ranks on one GPU, which NCCL can do from 2.30 on.
  version=$("$python" -c 'from thinwire import _library; print(_library.nccl_version())' 2>&1 | tail -n 1)
  case $version in
    *[!0-9.]*) absent nccl_self "expected NCCL, got: $version" ;;
    *) pytest nccl_self 30 -k one_rank "$tests/test_cuda_nccl.py" ;;
  esac
  case $version in
    2.[0-9] | 2.[0-9].* | 2.[12][0-9] | 2.[12][0-9].* | *[!0-9.]*)
      absent nccl "expected NCCL 2.30 or newer, got: $version" ;;
    *) pytest nccl 60 -k "not one_rank" "$tests/test_cuda_nccl.py" ;;
  esac
}

choose_loader
all_programs_start && program device 30 plain kernel_bench --device || finish
program parity 150 gtest kernel_test --gtest_filter='*cuda'
program graph 30 gtest cuda_graph_test
program engine 60 gtest device_test --gtest_filter='*cuda'
bandwidth
profile
with_torch
sanitizers
finish
