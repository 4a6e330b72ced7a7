#!/usr/bin/env bash
# Builds the package in place and runs what needs a GPU: tests, kernels under compute-sanitizer,
# benchmarks. Needs nvcc, g++ and a python3 with torch (CUDA), pybind11, setuptools, numpy, pyyaml,
# rich, typer and pytest (transformers for one file of tests); no network. Results go to $OUT (default: out/gpu).
#
#   tests/gpu/run_on_gpu.sh [build|tests|sanitizer|bench]...     all of them without an argument
#
# Every step has a time limit, 8 minutes together. The exit status is that of the worst step.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT="${OUT:-$PWD/out/gpu}"
PYTHON="${PYTHON:-python3}"
BUILD=build/gpu
mkdir -p "$OUT" "$BUILD"
exec > >(tee -a "$OUT/log") 2>&1
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export CXL_OFFLOAD_CUDA_ARCHS="${CXL_OFFLOAD_CUDA_ARCHS:-90}"
worst=0

# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  echo "=== $name"
  timeout --kill-after=5 "$limit" "$@"
  local status=$?
  echo "=== $name: exit status $status after $((SECONDS - begin)) s"
  [ "$status" -gt "$worst" ] && worst=$status
  return "$status"
}

describe() {
  date -u +%FT%TZ
  nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current --format=csv
  nvcc --version | tail -2
  "$PYTHON" -c 'import sys, torch; print(sys.version); print("torch", torch.__version__)'
  lscpu | grep -E 'Model name|^CPU\(s\)|NUMA|L3'
  free -g | head -2
}

build() {
  step "build" 150 "$PYTHON" setup.py --quiet build_ext --inplace || return
  step "build kernel_check" 60 nvcc -O2 -std=c++20 -lineinfo -arch="sm_${CXL_OFFLOAD_CUDA_ARCHS##*;}" \
    -Icsrc tests/gpu/kernel_check.cu csrc/gpu/*.cu csrc/transfer/packing.cc csrc/core/error.cc \
    -o "$BUILD/kernel_check"
}

tests() {
  step "tests" 200 "$PYTHON" -m pytest tests/gpu -m gpu -p no:cacheprovider -rs --durations=5 \
    --junitxml="$OUT/tests.xml" ${PYTEST_ARGS:-}
}

sanitizer() {
  step "kernel_check" 30 "$BUILD/kernel_check" || return
  local tool
  for tool in memcheck racecheck synccheck initcheck; do
    step "compute-sanitizer $tool" 45 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$BUILD/kernel_check" --short
  done
}

bench() {
  step "bench_gpu" 200 "$PYTHON" -m benchmarks.bench_gpu --json "$OUT/bench_gpu.json"
}

describe
if [ $# -gt 0 ]; then
  for part in "$@"; do "$part"; done
elif build; then
  tests
  sanitizer
  bench
fi
echo "=== worst exit status $worst, $SECONDS s in all"
exit "$worst"
