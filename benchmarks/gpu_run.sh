#!/usr/bin/env bash
# Runs all checks that need a GPU, from a bare checkout, in eight minutes at most (the limits below add up to 480 s):
# first correctness, then the sanitizers on small inputs, then speed. It installs nothing. With two GPUs or more, it
# takes up to five minutes more.
#
#   bash benchmarks/gpu_run.sh [FOLDER [checks|speed]]      (default: benchmarks/results/gpu-DATE, and both parts)
#
# All results are written to FOLDER. Required: Python 3.10 or newer with torch (CUDA), Triton >= 3.6 and numpy. The
# tests also require pytest and hypothesis. Without them, only the benchmark compares results with the reference.
# The sanitizers detect accesses out of bounds and races in shared memory. They do not detect races in global memory.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu-$(date +%F)}
part=${2:-all}
mkdir -p "$out"
: >"$out/summary.txt"
export PYTHONPATH=$PWD:$PWD/kernels PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
failed=0

note() { echo "== $*" | tee -a "$out/summary.txt"; }

stage() {  # stage NAME SECONDS COMMAND...: writes one log per stage; after a failure the other stages still run
  local name=$1 limit=$2 started=$SECONDS
  shift 2
  timeout -s INT -k 1 "$limit" "$@" >"$out/$name.log" 2>&1
  local status=$?
  tail -n 15 "$out/$name.log"
  note "$name: exit $status after $((SECONDS - started)) s"
  [ "$status" -eq 0 ] || failed=1
}

has() { "$python" -c "import $1" 2>/dev/null; }

stage machine 10 nvidia-smi
for needed in torch triton numpy; do
  has "$needed" || { note "$needed is missing: install it in $python and run again"; exit 1; }
done
if [ "$part" != speed ]; then
  tests=("$python" -m pytest -v --tb=short -W default -p no:cacheprovider -m gpu tests/kernels)
  if has pytest && has hypothesis; then
    several=()
    has xdist && several=(-n 8)
    stage correctness 60 env KERNEL_CASES=0.15 "${tests[@]}" "${several[@]}"
    # Every launch also in the executor of PTX, from the text that the GPU runs: all bits of all tensors are equal.
    stage executor 120 env TRITONCOMM_PTX=gpu KERNEL_CASES=0.03 "${tests[@]}" "${several[@]}"
    if command -v compute-sanitizer >/dev/null; then
      small=(env KERNEL_CASES=0.02 PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --report-api-errors no --error-exitcode 9)
      some="test_mark or expand or merge or rebalance or adam or rows or joined or entries or bad_indices or steps or tensors"
      stage memcheck 50 "${small[@]}" --tool memcheck "${tests[@]}" -k "$some"
      stage racecheck 30 "${small[@]}" --tool racecheck "${tests[@]}" -k test_mark
    else
      note "compute-sanitizer is not on the PATH: memcheck and racecheck are skipped"
    fi
  else
    note "pytest or hypothesis is missing: only the benchmark compares results with the reference"
    failed=1
  fi
  # The static forms in simulation, against the CPU, and how often the host waits in them. All methods and wrap() in a process group of one worker over NCCL.
  stage one-gpu 40 "$python" benchmarks/gpu.py --json "$out/one-gpu.json"
  [ "$part" = checks ] && exit "$failed"
fi
speed=("$python" benchmarks/selection.py --device cuda)
stage speed 110 "${speed[@]}" --n 1e6 25e6 100e6 --json "$out/selection.json"
stage speed-bf16 35 "${speed[@]}" --n 25e6 100e6 --density 0.01 0.001 --dtype bf16 --json "$out/selection-bf16.json"
stage speed-sections 25 "$python" benchmarks/sections.py --device cuda --json "$out/sections.json"

# What an emulated NCCL cannot show (tests/emulated_cuda). Each line is a check of gpu.py on NCCL, with no call of
# torch.cuda.set_device:
#   exchanges         oktopk, spardl, exdyna, topk_allgather and dense in both forms: all ranks have the same bits; host
#                     synchronizations that torch sees
#   nodes             subgroups of a default group with device_id, which NCCL makes by ncclCommSplit
#   wrapped           wrap() trains; seconds in metrics are those of CUDA events
#   ddp               a module in DDP beside SyncBatchNorm, for 30 steps without a deadlock
#   offloaded-shards  FSDP2 with CPUOffloadPolicy, which is exchanged over gloo
#   link              the doctor's latency and bandwidth
#   raises, raises-in-messages
#                     a rank raises in the middle of a step, in a collective or between messages: named on all others
#                     within seconds, who go on without it
#   dies, dies-in-messages
#                     a rank is killed: named after the time-out, an abort ends the wait of the others
#   hangs             a rank does something else: named after the time-out, also on itself
#   dies-with-ddp     the same with DDP, whose module is made again for the others
#   dies-with-fsdp    the same with FSDP2, which cannot go on without the rank
# A single one: torchrun --nproc-per-node=2 benchmarks/gpu.py --only NAME
gpus=$(nvidia-smi --list-gpus | wc -l)
if [ "$gpus" -ge 2 ]; then
  stage multi-gpu 300 "$python" -m torch.distributed.run --standalone --nproc-per-node "$((gpus < 8 ? gpus : 8))" \
    benchmarks/gpu.py --json "$out/multi-gpu.json"
else
  note "there is one GPU: the checks between several GPUs are skipped"
fi
exit "$failed"
