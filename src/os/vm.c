#include "os/vm.h"

#include "base/assert.h"
#include "os/file.h"
#include "os/filters.h"
#include "os/mman.h"
#include "os/syscall.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#ifndef PR_SET_VMA
#define PR_SET_VMA           0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

#define PRIVATE_MEMORY (MAP_PRIVATE | MAP_ANONYMOUS)

size_t vm_page_size(void) {
    static _Atomic(size_t) page_size; /* every thread stores the same value */
    size_t known = atomic_load_explicit(&page_size, memory_order_relaxed);
    if (known == 0) {
        known = getauxval(AT_PAGESZ);
        atomic_store_explicit(&page_size, known, memory_order_relaxed);
    }
    return known;
}

enum when { HUGE_UNREAD, HUGE_NEVER, HUGE_ON_REQUEST, HUGE_ALWAYS };

static enum when huge_pages_when(void) {
    static _Atomic(int) when; /* if two threads store a result, either is right */
    int known = atomic_load_explicit(&when, memory_order_relaxed);
    if (known == HUGE_UNREAD) {
        char text[64];
        bool read = file_read("/sys/kernel/mm/transparent_hugepage/enabled", text, sizeof text) > 0;
        known = read && strstr(text, "[always]") != NULL    ? HUGE_ALWAYS
                : read && strstr(text, "[madvise]") != NULL ? HUGE_ON_REQUEST
                                                            : HUGE_NEVER;
        atomic_store_explicit(&when, known, memory_order_relaxed);
    }
    return (enum when)known;
}

/* Returns the memory that a full page of page tables maps. sysfs has this size,
 * too, but a short program would have to read one more file. */
static size_t huge_page_bytes(void) {
    return vm_page_size() / sizeof(uint64_t) * vm_page_size();
}

size_t huge_pages_always_bytes(void) {
    return huge_pages_when() == HUGE_ALWAYS ? huge_page_bytes() : 0;
}

size_t huge_pages_request_bytes(void) {
    return huge_pages_when() >= HUGE_ON_REQUEST ? huge_page_bytes() : 0;
}

static bool is_error(long result) {
    return result < 0 && result > -4096;
}

static long vm_advise(void *base, size_t bytes, int advice) {
    return os_syscall(SYS_madvise, base, bytes, advice);
}

/* Declines huge pages, once for the whole mapping, if every fault may bring one
 * in. A partly used slab would otherwise hold 2 MiB. */
static void decline_huge_pages(void *base, size_t bytes) {
    if (huge_pages_when() == HUGE_ALWAYS) {
        vm_disable_huge_pages(base, bytes);
    }
}

static _Atomic(bool) has_no_names; /* the kernel */

/* Shows the library's memory as [anon:calmalloc] in /proc/PID/maps and smaps,
 * from Linux 5.17 on, if it was built with ANON_VMA_NAME. The guards have the
 * name, too, because mappings with different names cannot merge. */
static void name_range(void *base, size_t bytes) {
    if (filters_now() != FILTERS_ADDED && !atomic_load_explicit(&has_no_names, memory_order_relaxed) &&
        os_syscall(SYS_prctl, PR_SET_VMA, PR_SET_VMA_ANON_NAME, base, bytes, "calmalloc") != 0) {
        atomic_store_explicit(&has_no_names, true, memory_order_relaxed);
    }
}

bool vm_can_merge_replaced(void) {
    return filters_now() != FILTERS_ADDED || atomic_load_explicit(&has_no_names, memory_order_relaxed);
}

/* The kernel unmaps an old range before it maps a new one in its place, so no
 * fence is needed. The counter is for ThreadSanitizer, which sees no system
 * call: by the counter, each vm_release happens before the next vm_reserve. */
static _Atomic(size_t) ranges_reserved;

static void *map_between_guards(size_t bytes) {
    size_t guard = vm_page_size();
    size_t padded = vm_round_up(bytes) + 2 * guard;
    if (padded < bytes) {
        return NULL;
    }
    long result = os_syscall(SYS_mmap, 0, padded, PROT_NONE, PRIVATE_MEMORY | MAP_NORESERVE, -1);
    if (is_error(result)) {
        return NULL;
    }
    atomic_fetch_add_explicit(&ranges_reserved, 1, memory_order_acquire);
    name_range((void *)result, padded);
    return (char *)result + guard;
}

void *vm_reserve(size_t bytes) {
    void *base = map_between_guards(bytes);
    if (base != NULL) {
        decline_huge_pages(base, bytes);
        /* Debuggers write memory without access rights to a core file, too.
         * This keeps reserved memory out of it. */
        vm_advise(base, bytes, MADV_DONTDUMP);
    }
    return base;
}

static bool make_writable(void *base, size_t bytes) {
    return !is_error(os_syscall(SYS_mprotect, base, bytes, PROT_READ | PROT_WRITE));
}

bool vm_commit(void *base, size_t bytes) {
    calm_assert(((uintptr_t)base & (vm_page_size() - 1)) == 0 && bytes > 0, base, bytes);
    if (!make_writable(base, bytes)) {
        return false;
    }
    vm_advise(base, bytes, MADV_DODUMP);
    return true;
}

/* In this order neither call splits a mapping. Each call gives the front of a
 * mapping the flags of the mapping before it, so the kernel only moves the
 * boundary between the two. The function therefore also succeeds in a process
 * that has as many mappings as it may have. */
bool vm_commit_next(void *base, size_t bytes) {
    calm_assert((((uintptr_t)base | bytes) & (vm_page_size() - 1)) == 0 && bytes > 0, base, bytes);
    vm_advise(base, bytes + vm_page_size(), MADV_DODUMP);
    return make_writable(base, bytes);
}

bool vm_decommit(void *base, size_t bytes) {
    calm_assert((((uintptr_t)base | bytes) & (vm_page_size() - 1)) == 0 && bytes > 0, base, bytes);
    if (!is_error(os_syscall(SYS_mprotect, base, bytes, PROT_NONE))) {
        size_t page = vm_page_size(); /* this page stays in core files, as after vm_commit_next */
        vm_advise((char *)base + page, bytes - page, MADV_DONTDUMP);
        return true;
    }
    make_writable(base, bytes); /* the first call may have changed a part */
    return false;
}

void *vm_map(size_t bytes) {
    void *base = map_between_guards(bytes);
    if (base != NULL && !make_writable(base, bytes)) {
        vm_release(base, bytes);
        return NULL;
    }
    if (base != NULL) {
        decline_huge_pages(base, bytes);
    }
    return base;
}

void *vm_map_shared(size_t bytes) {
    long result = os_syscall(SYS_mmap, 0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
    return is_error(result) ? NULL : (void *)result;
}

void vm_release(void *base, size_t bytes) {
    calm_assert(base != NULL && ((uintptr_t)base & (vm_page_size() - 1)) == 0, base, bytes);
    atomic_fetch_add_explicit(&ranges_reserved, 0, memory_order_release);
    size_t guard = vm_page_size();
    os_syscall(SYS_munmap, (char *)base - guard, vm_round_up(bytes) + 2 * guard);
}

void vm_make_readable(void *base, size_t bytes) {
    os_syscall(SYS_mprotect, base, bytes, PROT_READ);
}

bool vm_prefault(void *base, size_t bytes) {
    long result = vm_advise(base, bytes, MADV_POPULATE_WRITE);
    return result != -EINVAL && result != -EPERM;
}

bool vm_enable_huge_pages(void *base, size_t bytes) {
    return vm_advise(base, bytes, MADV_HUGEPAGE) == 0;
}

void vm_disable_huge_pages(void *base, size_t bytes) {
    vm_advise(base, bytes, MADV_NOHUGEPAGE);
}

static _Atomic(bool) locks_mappings;

void vm_note_locked_mappings(bool locked) {
    atomic_store_explicit(&locks_mappings, locked, memory_order_relaxed);
}

bool vm_locks_mappings(void) {
    return atomic_load_explicit(&locks_mappings, memory_order_relaxed);
}

/* If the kernel locks new mappings, the new mapping has no access rights until
 * it is unlocked. With access rights, all of it would become resident. */
bool vm_replace(void *base, size_t bytes) {
    calm_assert((((uintptr_t)base | bytes) & (vm_page_size() - 1)) == 0 && bytes > 0, base, bytes);
    bool locks = filters_now() != FILTERS_ADDED && vm_locks_mappings();
    int rights = locks ? PROT_NONE : PROT_READ | PROT_WRITE;
    if (is_error(os_syscall(SYS_mmap, base, bytes, rights, PRIVATE_MEMORY | MAP_NORESERVE | MAP_FIXED, -1))) {
        return false;
    }
    name_range(base, bytes);
    decline_huge_pages(base, bytes);
    return !locks || (os_syscall(SYS_munlock, base, bytes) == 0 && make_writable(base, bytes));
}

/* Divides the range into halves. msync succeeds if all of a part is mapped, and
 * MAP_FIXED_NOREPLACE if none of it is. */
void vm_fill_holes(void *base, size_t bytes) {
    if (filters_now() == FILTERS_ADDED || os_syscall(SYS_msync, base, bytes, MS_ASYNC) == 0 ||
        !is_error(os_syscall(SYS_mmap, base, bytes, PROT_NONE,
                             PRIVATE_MEMORY | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1))) {
        return;
    }
    size_t half = vm_round_up(bytes / 2);
    if (half < bytes) {
        vm_fill_holes(base, half);
        vm_fill_holes((char *)base + half, bytes - half);
    }
}

enum vm_renewed vm_renew(void *base, size_t bytes) {
    static const int undoing[] = {MADV_GUARD_REMOVE, MADV_NORMAL,      MADV_DOFORK,    MADV_KEEPONFORK,
                                  MADV_DODUMP,       MADV_UNMERGEABLE, MADV_NOHUGEPAGE};
    if (vm_replace(base, bytes)) {
        return VM_RENEWED;
    }
    /* mprotect alone does not remove a protection key. */
    bool may_ask = filters_now() != FILTERS_ADDED;
    if ((!may_ask || os_syscall(SYS_pkey_mprotect, base, bytes, PROT_READ | PROT_WRITE, 0) != 0) &&
        !make_writable(base, bytes)) {
        return VM_UNUSABLE;
    }
    if (may_ask) {
        os_syscall(SYS_munlock, base, bytes);
        os_syscall(SYS_mbind, base, bytes, MPOL_DEFAULT, 0, 0, 0);
    }
    for (size_t i = 0; i < sizeof undoing / sizeof *undoing; i++) {
        vm_advise(base, bytes, undoing[i]);
    }
    return VM_RESTORED;
}

/* A request to grow in place cannot succeed, since what follows is mapped. The
 * kernel's answer to it tells mappings apart. */
static bool is_one_mapping(void *base, size_t bytes) {
    return os_syscall(SYS_mremap, base, bytes, bytes + vm_page_size(), 0) != -EFAULT;
}

/* Kernels before 6.17 move no more than one mapping, and have unmapped the
 * target by the time they find several: another thread might then map the hole.
 * Later ones move several one by one, and may fail on the way. */
bool vm_move_pages(void *from, void *to, size_t bytes) {
    if (!is_one_mapping(from, bytes)) {
        return false;
    }
    calm_assert((char *)from + bytes <= (char *)to || (char *)to + bytes <= (char *)from, from, to, bytes);
    if (is_error(os_syscall(SYS_mremap, from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP,
                            to))) {
        return false;
    }
    /* The kernel leaves an empty mapping behind, so no other mapping can take
     * its place. QEMU's user emulation takes the mapping for released, and
     * needs this call. */
    vm_replace(from, bytes);
    return true;
}

bool vm_can_map(size_t bytes) {
    long base = os_syscall(SYS_mmap, 0, bytes, PROT_READ | PROT_WRITE, PRIVATE_MEMORY, -1);
    if (is_error(base)) {
        return false;
    }
    os_syscall(SYS_munmap, base, bytes);
    return true;
}

size_t vm_limit_bytes(void) {
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    long result = os_syscall(SYS_prlimit64, 0, RLIMIT_AS, 0, &limit);
    return is_error(result) || limit.rlim_cur == RLIM_INFINITY ? SIZE_MAX : (size_t)limit.rlim_cur;
}
