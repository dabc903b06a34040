#!/usr/bin/env bash
# Cross-compiles the torch-free code and its tests for 64-bit Arm and runs them in QEMU on NEON, SVE and SVE2 (vectors of
# 512 bits) and on Highway's special targets for SVE of 256 and SVE2 of 128 bits. Arguments go to ctest, e.g. -R gemm.
# QEMU is some 30 times slower than a CPU, 300 times for SVE: JUMAR_TEST_SMALL leaves out what repeats the same code.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
need() { [[ -e $2 ]] || missing+=("$1"); }
need g++-aarch64-linux-gnu /usr/bin/aarch64-linux-gnu-g++
need qemu-user /usr/bin/qemu-aarch64
need libhwy-dev:arm64 /usr/lib/aarch64-linux-gnu/libhwy.so
need libgomp1:arm64 /usr/lib/aarch64-linux-gnu/libgomp.so.1
need googletest /usr/src/googletest/CMakeLists.txt
need cmake /usr/bin/cmake
need ninja-build /usr/bin/ninja

if [[ ${#missing[@]} -ne 0 ]]; then
  if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "make test-arm needs these system packages: ${missing[*]}" >&2
    echo "on Debian or Ubuntu: sudo dpkg --add-architecture arm64 && sudo apt-get update &&" >&2
    echo "  sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  export DEBIAN_FRONTEND=noninteractive
  dpkg --add-architecture arm64
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

cmake -G Ninja -S . -B build/arm -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake" -DCMAKE_BUILD_TYPE=Release \
  -DJUMAR_TORCH=OFF -DJUMAR_TESTS=ON -DJUMAR_GTEST_SOURCE=/usr/src/googletest/googletest >/dev/null
cmake --build build/arm --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"

jobs=$(nproc)  # before OMP_NUM_THREADS, which nproc obeys
# Threads wait without spinning: an emulator gains nothing from it. Tests of threads set their number themselves.
export JUMAR_TEST_SMALL=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
failed=()
run() {  # run TARGET VECTOR-BITS [CTEST-ARGUMENTS]
  local target=$1 bits=$2
  shift 2
  echo "$target with vectors of $bits bits"
  QEMU_CPU="max,sve-default-vector-length=$((bits / 8))" JUMAR_TEST_TARGETS="$target" \
    ctest --test-dir build/arm --output-on-failure --timeout 3600 --parallel "$jobs" "$@" || failed+=("$target")
}
run NEON 128 "$@"
run SVE 512 "$@"
run SVE2 512 "$@"
run SVE_256 256 "$@"
run SVE2_128 128 "$@"
[[ ${#failed[@]} -eq 0 ]] || { echo "failed on: ${failed[*]}" >&2; exit 1; }
