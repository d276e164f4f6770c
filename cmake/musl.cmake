# Builds against musl by Debian's musl-gcc, whose headers lack the kernel's.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_C_COMPILER musl-gcc)
set(kernel_headers ${CMAKE_CURRENT_LIST_DIR}/../build/musl/kernel-headers)
file(MAKE_DIRECTORY ${kernel_headers})
file(CREATE_LINK /usr/include/linux ${kernel_headers}/linux SYMBOLIC)
file(CREATE_LINK /usr/include/asm-generic ${kernel_headers}/asm-generic SYMBOLIC)
file(CREATE_LINK /usr/include/x86_64-linux-gnu/asm ${kernel_headers}/asm SYMBOLIC)
set(CMAKE_C_FLAGS_INIT "-idirafter ${kernel_headers}")
