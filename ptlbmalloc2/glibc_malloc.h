/* The names under which glibc exports its own malloc, also where another library has taken the usual ones. */
#ifndef PTLBMALLOC2_GLIBC_MALLOC_H
#define PTLBMALLOC2_GLIBC_MALLOC_H

#include <malloc.h>
#include <stddef.h>

extern void *__libc_malloc(size_t bytes);
extern void __libc_free(void *block);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *block, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern int __libc_mallopt(int parameter, int value);
extern struct mallinfo __libc_mallinfo(void);

#endif
