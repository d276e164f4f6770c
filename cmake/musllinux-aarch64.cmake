# The same for arm64, with the musl that packaging/musl-aarch64 unpacks.
set(CMAKE_SYSTEM_PROCESSOR aarch64)
get_filename_component(musl_root ${CMAKE_CURRENT_LIST_DIR}/../build/musl-aarch64 ABSOLUTE)
include(${CMAKE_CURRENT_LIST_DIR}/musllinux.cmake)
# The cross-compiler's functions that choose atomic instructions at run time ask glibc for the processor's features.
string(APPEND CMAKE_C_FLAGS_INIT " -mno-outline-atomics")
