#!/usr/bin/env bash
# Everything that needs a GPU, from a bare checkout, in under eight minutes (the limits below add up to 435 s): correctness first, then the
# sanitizers on small inputs, then speed. Needs Python 3.10 or newer with torch (CUDA), Triton >= 3.6, numpy,
# pytest, hypothesis and matplotlib, and installs nothing. Results land in one folder:
#
#   bash benchmarks/gpu_run.sh [FOLDER]      (default: benchmarks/results/gpu-DATE)
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu-$(date +%F)}
mkdir -p "$out"
export PYTHONPATH=$PWD:$PWD/kernels PYTHONUNBUFFERED=1 MPLBACKEND=agg
python=${PYTHON:-python3}
failed=0

stage() {  # stage NAME SECONDS COMMAND...: one log per stage; a failure is remembered and the rest still runs
  local name=$1 limit=$2 started=$SECONDS
  shift 2
  echo "== $name"
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  local status=$?
  tail -n 15 "$out/$name.log"
  echo "== $name: exit $status after $((SECONDS - started)) s" | tee -a "$out/summary.txt"
  [ "$status" -eq 0 ] || failed=1
}

tests=("$python" -m pytest -q -W default -p no:cacheprovider -m gpu tests/kernels)
stage machine 10 nvidia-smi
stage correctness 130 env KERNEL_CASES=0.3 "${tests[@]}" --durations=5
if command -v compute-sanitizer >/dev/null; then
  small=(env KERNEL_CASES=0.02 PYTORCH_NO_CUDA_MEMORY_CACHING=1)
  for tool in memcheck racecheck; do
    stage "$tool" 45 "${small[@]}" compute-sanitizer --tool "$tool" --error-exitcode 9 "${tests[@]}" -k "by_hand or expand or gather or sum_lists or merge or rebalance or adam"
  done
else
  echo "compute-sanitizer is not on the PATH: skipped" | tee -a "$out/summary.txt"
fi
speed=("$python" benchmarks/selection.py --device cuda --density 0.01 0.001)
stage speed 90 "${speed[@]}" --n 1e6 25e6 100e6 --reps 15 --no-compile --json "$out/selection.json" --plot "$out/selection.png"
stage speed-bf16 45 "${speed[@]}" --n 25e6 100e6 --dtype bf16 --reps 15 --no-compile --json "$out/selection-bf16.json"
stage speed-compiled 70 "${speed[@]}" --n 25e6 --reps 10 --json "$out/selection-compiled.json"
exit "$failed"
