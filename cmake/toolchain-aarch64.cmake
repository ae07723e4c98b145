# AArch64 Linux, built on another machine with Debian's cross compiler (scripts/install_deps.sh aarch64). What the build runs,
# and ctest, runs under QEMU's user mode.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# Where the cross compiler's C and C++ libraries lie: the loader looks for them under it.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static;-L;/usr/aarch64-linux-gnu)
