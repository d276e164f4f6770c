#include "os/vm.h"

#include "os/huge_pages.h"
#include "os/mman.h"
#include "os/syscall.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/auxv.h>
#include <sys/resource.h>

#define PRIVATE_MEMORY (MAP_PRIVATE | MAP_ANONYMOUS)

size_t vm_page_size(void) {
    static _Atomic(size_t) page_size; /* every thread stores the same */
    size_t known = atomic_load_explicit(&page_size, memory_order_relaxed);
    if (known == 0) {
        known = getauxval(AT_PAGESZ);
        atomic_store_explicit(&page_size, known, memory_order_relaxed);
    }
    return known;
}

static bool is_error(long result) {
    return result < 0 && result > -4096;
}

static long advise(void *base, size_t bytes, int advice) {
    return os_syscall(SYS_madvise, base, bytes, advice);
}

static void unmap(uintptr_t start, uintptr_t end) {
    if (end > start) {
        os_syscall(SYS_munmap, start, end - start);
    }
}

/* Where every fault may bring in a huge page, a part-used slab would hold 2 MiB: this declines them once, for
 * the whole mapping. */
static void decline_huge_pages(void *base, size_t bytes) {
    static _Atomic(int) everywhere = -1; /* every thread stores the same */
    int known = atomic_load_explicit(&everywhere, memory_order_relaxed);
    if (known < 0) {
        known = huge_pages_always_bytes() != 0;
        atomic_store_explicit(&everywhere, known, memory_order_relaxed);
    }
    if (known) {
        vm_disable_huge_pages(base, bytes);
    }
}

/* The kernel unmaps an old range before it maps a new one in its place, so no fence is needed. This is for
 * ThreadSanitizer, which sees no system call: each vm_release happens before the next vm_reserve. */
static _Atomic(size_t) ranges_reserved;

void *vm_reserve(size_t bytes, size_t alignment) {
    size_t guard = vm_page_size();
    size_t padded = vm_round_up(bytes) + 2 * guard + (alignment > guard ? alignment : 0);
    if (padded < bytes) {
        return NULL;
    }
    long result = os_syscall(SYS_mmap, 0, padded, PROT_NONE, PRIVATE_MEMORY | MAP_NORESERVE, -1);
    if (is_error(result)) {
        return NULL;
    }
    atomic_fetch_add_explicit(&ranges_reserved, 1, memory_order_acquire);
    uintptr_t start = (uintptr_t)result;
    uintptr_t base = size_round_up(start + guard, alignment);
    unmap(start, base - guard);
    unmap(base + vm_round_up(bytes) + guard, start + padded);
    decline_huge_pages((void *)base, bytes);
    /* Until it is committed: debuggers write what has no access rights to a core file, too. */
    advise((void *)base, bytes, MADV_DONTDUMP);
    return (void *)base;
}

bool vm_commit(void *base, size_t bytes) {
    if (is_error(os_syscall(SYS_mprotect, base, bytes, PROT_READ | PROT_WRITE))) {
        return false;
    }
    advise(base, bytes, MADV_DODUMP);
    return true;
}

void *vm_map(size_t bytes) {
    void *base = vm_reserve(bytes, vm_page_size());
    if (base != NULL && !vm_commit(base, bytes)) {
        vm_release(base, bytes);
        return NULL;
    }
    return base;
}

void vm_release(void *base, size_t bytes) {
    atomic_fetch_add_explicit(&ranges_reserved, 0, memory_order_release);
    size_t guard = vm_page_size();
    unmap((uintptr_t)base - guard, (uintptr_t)base + vm_round_up(bytes) + guard);
}

void vm_make_readable(void *base, size_t bytes) {
    os_syscall(SYS_mprotect, base, bytes, PROT_READ);
}

bool vm_populate(void *base, size_t bytes) {
    long result = advise(base, bytes, MADV_POPULATE_WRITE);
    return result != -EINVAL && result != -EPERM;
}

bool vm_enable_huge_pages(void *base, size_t bytes) {
    return advise(base, bytes, MADV_HUGEPAGE) == 0;
}

void vm_disable_huge_pages(void *base, size_t bytes) {
    advise(base, bytes, MADV_NOHUGEPAGE);
}

bool vm_replace(void *base, size_t bytes) {
    if (is_error(os_syscall(SYS_mmap, base, bytes, PROT_READ | PROT_WRITE,
                            PRIVATE_MEMORY | MAP_NORESERVE | MAP_FIXED, -1))) {
        return false;
    }
    decline_huge_pages(base, bytes);
    return true;
}

bool vm_move_pages(void *from, void *to, size_t bytes) {
    if (is_error(os_syscall(SYS_mremap, from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP,
                            to))) {
        return false;
    }
    /* The kernel leaves an empty mapping, so that no other mapping can take its place. QEMU's user emulation
     * believes it gone, and has to be told. */
    vm_replace(from, bytes);
    return true;
}

bool vm_can_map(size_t bytes) {
    long base = os_syscall(SYS_mmap, 0, bytes, PROT_READ | PROT_WRITE, PRIVATE_MEMORY, -1);
    if (is_error(base)) {
        return false;
    }
    unmap((uintptr_t)base, (uintptr_t)base + bytes);
    return true;
}

size_t vm_limit_bytes(void) {
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    long result = os_syscall(SYS_prlimit64, 0, RLIMIT_AS, 0, &limit);
    return is_error(result) || limit.rlim_cur == RLIM_INFINITY ? SIZE_MAX : (size_t)limit.rlim_cur;
}
