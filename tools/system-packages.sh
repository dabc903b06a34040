#!/usr/bin/env bash
# Makes sure that the compiler and the libraries that pip cannot bring are there. As root it installs what is missing;
# otherwise it says what to install.
set -eu

missing=()
need() {  # need PACKAGE FILE-OR-COMMAND
  if [[ $2 == /* ]]; then
    [[ -e $2 ]] || missing+=("$1")
  else
    command -v "$2" >/dev/null || missing+=("$1")
  fi
}

need g++ g++
need cmake cmake
need make make
need libhwy-dev /usr/include/hwy/highway.h
need libgtest-dev /usr/include/gtest/gtest.h
need libbenchmark-dev /usr/include/benchmark/benchmark.h
need clang-format clang-format
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)

[[ ${#missing[@]} -eq 0 ]] && exit 0
if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "jumar needs these system packages, please install them: ${missing[*]}" >&2
  echo "on Debian or Ubuntu: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
