# Builds against musl under the name that Alpine gives it, libc.musl-MACHINE.so.1, which musllinux wheels must use. Any
# musl takes that name for itself.
include(${CMAKE_CURRENT_LIST_DIR}/musl.cmake)
set(alpine ${links}/alpine)
file(MAKE_DIRECTORY ${alpine})
file(CREATE_LINK ${musl_root}/usr/lib/${machine}-linux-musl/libc.so ${alpine}/libc.musl-${machine}.so.1 SYMBOLIC)
# The compiler's own -lc, which comes later, is then not needed.
set(CMAKE_C_STANDARD_LIBRARIES_INIT "-L${alpine} -Wl,--as-needed -l:libc.musl-${machine}.so.1")
