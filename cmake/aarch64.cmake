# Toolchain file: cross-compile for 64-bit Arm on a Debian x86 machine and run what was built in QEMU.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu /usr/lib/aarch64-linux-gnu /usr)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# QEMU_CPU chooses the vector length: see tools/test-arm.sh.
# No -L: the loader must be that of libc6:arm64, whose libc the tests load beside Highway. The loader of the cross
# toolchain is of another build; with it the first pthread_create never returns.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)
