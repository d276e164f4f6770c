/* <sys/mman.h>, with the kernel's newer numbers that the oldest C library we build on does not name. */
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
