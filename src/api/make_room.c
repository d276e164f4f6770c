/*
 * mmap. If the allocator's free memory takes the address space that a mapping
 * needs, the wrapper releases this memory, and repeats the call. It passes the
 * calls on to the next definition (next.h).
 */
#ifdef CALM_SHARED_LIBRARY

#include "api/limits.h"
#include "api/next.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))

/* The calls come from the program, also from its signal handlers. The C
 * library's own mappings, and the allocator's, do not come here. */
typedef void *mmap_function(void *, size_t, int, int, int, off_t);

static _Atomic(any_function) next_mmap;

EXPORT void *mmap(void *address, size_t bytes, int access, int flags, int file, off_t offset) {
    mmap_function *next = (mmap_function *)next_of(&next_mmap, "mmap");
    if (next == NULL) {
        errno = ENOSYS;
        return MAP_FAILED;
    }
    int saved_errno = errno;
    void *base = next(address, bytes, access, flags, file, offset);
    if (base == MAP_FAILED && errno == ENOMEM && limits_make_room(LIMITS_FAILED)) {
        base = next(address, bytes, access, flags, file, offset);
        errno = base == MAP_FAILED ? ENOMEM : saved_errno;
    }
    return base;
}

/* On 64-bit systems both kinds of offsets are equal. */
EXPORT void *mmap_64(void *address, size_t bytes, int access, int flags, int file,
                     off_t offset) __asm__("mmap64") __attribute__((alias("mmap"), nothrow, leaf));

/* A signal handler may map memory, so the function is looked up at the
 * start. */
__attribute__((constructor)) static void make_room_look_up(void) {
    next_of(&next_mmap, "mmap");
}

#endif
