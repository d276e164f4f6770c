#include "os/address_space.h"

#include "os/huge_pages.h"
#include "os/mman.h"
#include "os/syscall.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/auxv.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#define STEP_LEAST ((size_t)256 << 10)
#define STEP_MOST  ((size_t)256 << 20)

size_t os_page_size(void) {
    static size_t page_size; /* every thread finds the same */
    size_t known = __atomic_load_n(&page_size, __ATOMIC_RELAXED);
    if (known == 0) {
        known = getauxval(AT_PAGESZ);
        __atomic_store_n(&page_size, known, __ATOMIC_RELAXED);
    }
    return known;
}

static bool failed(long result) {
    return result < 0 && result > -4096;
}

/* Where every fault may bring a huge page, a part-used slab would hold 2 MiB: say no once, for the whole
 * mapping. */
static void decline_huge_pages(void *base, size_t bytes) {
    static int everywhere = -1; /* every thread finds the same */
    int known = __atomic_load_n(&everywhere, __ATOMIC_RELAXED);
    if (known < 0) {
        known = huge_page_always_bytes() != 0;
        __atomic_store_n(&everywhere, known, __ATOMIC_RELAXED);
    }
    if (known) {
        os_want_no_huge_pages(base, bytes);
    }
}

/* The kernel unmaps an old range before it maps a new one in its place, so no fence is needed. This is for
 * ThreadSanitizer, which sees no system call: each os_release happens before the next os_reserve. */
static _Atomic(size_t) ranges_reserved;

void *os_reserve(size_t bytes, size_t alignment) {
    size_t guard = os_page_size();
    size_t padded = bytes + 2 * guard + (alignment > os_page_size() ? alignment : 0);
    if (padded < bytes) {
        return NULL;
    }
    long result =
        os_syscall(SYS_mmap, 0, (long)padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (failed(result)) {
        return NULL;
    }
    atomic_fetch_add_explicit(&ranges_reserved, 1, memory_order_acquire);
    uintptr_t start = (uintptr_t)result;
    uintptr_t end = start + padded;
    uintptr_t base = (start + guard + alignment - 1) & ~(uintptr_t)(alignment - 1);
    if (base - guard > start) {
        os_syscall(SYS_munmap, (long)start, (long)(base - guard - start), 0, 0, 0, 0);
    }
    if (base + bytes + guard < end) {
        os_syscall(SYS_munmap, (long)(base + bytes + guard), (long)(end - base - bytes - guard), 0, 0, 0, 0);
    }
    decline_huge_pages((void *)base, bytes);
    /* Until it is usable: debuggers write what has no access rights to a core file, too. */
    os_syscall(SYS_madvise, (long)base, (long)bytes, MADV_DONTDUMP, 0, 0, 0);
    return (void *)base;
}

size_t os_address_space_limit(void) {
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    long result = os_syscall(SYS_prlimit64, 0, RLIMIT_AS, 0, (long)&limit, 0, 0);
    return failed(result) || limit.rlim_cur == RLIM_INFINITY ? SIZE_MAX : (size_t)limit.rlim_cur;
}

size_t os_memory_bytes(void) {
    struct sysinfo info = {0};
    os_syscall(SYS_sysinfo, (long)&info, 0, 0, 0, 0, 0);
    return (size_t)info.totalram * info.mem_unit;
}

bool os_would_map(size_t bytes) {
    long base =
        os_syscall(SYS_mmap, 0, (long)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (failed(base)) {
        return false;
    }
    os_syscall(SYS_munmap, base, (long)bytes, 0, 0, 0, 0);
    return true;
}

bool os_commit(void *base, size_t bytes) {
    if (failed(os_syscall(SYS_mprotect, (long)base, (long)bytes, PROT_READ | PROT_WRITE, 0, 0, 0))) {
        return false;
    }
    os_syscall(SYS_madvise, (long)base, (long)bytes, MADV_DODUMP, 0, 0, 0);
    return true;
}

void os_make_readable(void *base, size_t bytes) {
    size_t page = os_page_size();
    os_syscall(SYS_mprotect, (long)base, (long)((bytes + page - 1) & ~(page - 1)), PROT_READ, 0, 0, 0);
}

bool os_populate(void *base, size_t bytes) {
    long result = os_syscall(SYS_madvise, (long)base, (long)bytes, MADV_POPULATE_WRITE, 0, 0, 0);
    return result != -EINVAL && result != -EPERM;
}

bool os_want_huge_pages(void *base, size_t bytes) {
    return os_syscall(SYS_madvise, (long)base, (long)bytes, MADV_HUGEPAGE, 0, 0, 0) == 0;
}

void os_want_no_huge_pages(void *base, size_t bytes) {
    os_syscall(SYS_madvise, (long)base, (long)bytes, MADV_NOHUGEPAGE, 0, 0, 0);
}

bool os_renew(void *base, size_t bytes) {
    if (failed(os_syscall(SYS_mmap, (long)base, (long)bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0))) {
        return false;
    }
    decline_huge_pages(base, bytes);
    return true;
}

bool os_move_pages(void *from, void *to, size_t bytes) {
    if (failed(os_syscall(SYS_mremap, (long)from, (long)bytes, (long)bytes,
                          MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, (long)to, 0))) {
        return false;
    }
    /* The kernel leaves an empty mapping, so that nobody can take the place; QEMU's user emulation thinks it
     * gone. */
    os_renew(from, bytes);
    return true;
}

bool os_region_grow(struct os_region *region, size_t bytes) {
    if (bytes > region->reserved) {
        return false;
    }
    size_t page = os_page_size();
    size_t least = (bytes - region->committed + page - 1) & ~(page - 1);
    size_t step = region->committed / 4;
    step = step < STEP_LEAST ? STEP_LEAST : step > STEP_MOST ? STEP_MOST : step;
    step = (step + page - 1) & ~(page - 1);
    if (step > region->reserved - region->committed) {
        step = region->reserved - region->committed;
    }
    /* Where memory is short, what is needed may still be had. */
    if (step > least && os_commit(region->base + region->committed, step)) {
        region->committed += step;
        return true;
    }
    if (!os_commit(region->base + region->committed, least)) {
        return false;
    }
    region->committed += least;
    return true;
}

void os_region_trim(struct os_region *region, size_t bytes) {
    size_t page = os_page_size();
    size_t keep = (bytes + page - 1) & ~(page - 1);
    keep = keep > region->committed ? keep : region->committed;
    if (keep < region->reserved) {
        /* What follows the new end is the guard now. */
        os_syscall(SYS_munmap, (long)(region->base + keep + page), (long)(region->reserved - keep), 0, 0, 0,
                   0);
        region->reserved = keep;
    }
}

void os_release(void *base, size_t bytes) {
    atomic_fetch_add_explicit(&ranges_reserved, 0, memory_order_release);
    size_t guard = os_page_size();
    os_syscall(SYS_munmap, (long)base - (long)guard, (long)(bytes + 2 * guard), 0, 0, 0, 0);
}
