/* <sys/mman.h>, with newer constants of the kernel that the oldest supported C library does not define. */
#ifndef CALM_OS_MMAN_H
#define CALM_OS_MMAN_H

#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

#endif
