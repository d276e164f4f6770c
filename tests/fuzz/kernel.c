#include "kernel.h"

#include "check.h"
#include "os/address_range.h"
#include "os/memory.h"
#include "os/purge.h"
#include "os/syscall.h"
#include "os/thread.h"
#include "os/vm.h"

#include <errno.h>

#define MACHINE_BYTES ((size_t)1 << 30)
#define MAX_MAPPED    4096

static uint32_t pattern;
static size_t refusals;
static bool lost_pages;
static size_t limit = SIZE_MAX;
static size_t left = MACHINE_BYTES;

/* Ranges that the code under test has mapped, guards included. */
static struct mapped { uintptr_t start, end; } mapped[MAX_MAPPED];
static size_t mapped_count;
static bool keeps = true; /* what constructors map */

static void note_mapped(uintptr_t start, uintptr_t end) {
    if (start < end) {
        CHECK(mapped_count < MAX_MAPPED);
        mapped[mapped_count++] = (struct mapped){start, end};
    }
}

/* Of a range that stays some of the rest may be behind what goes. */
static void note_unmapped(uintptr_t start, uintptr_t end) {
    for (size_t i = mapped_count; i-- > 0;) {
        struct mapped range = mapped[i];
        if (range.start < end && start < range.end) {
            mapped[i] = mapped[--mapped_count];
            note_mapped(range.start, start < range.start ? range.start : start);
            note_mapped(end > range.end ? range.end : end, range.end);
        }
    }
}

void kernel_reset(void) {
    for (; mapped_count > 0; mapped_count--) {
        const struct mapped *range = &mapped[mapped_count - 1];
        CHECK(os_syscall(SYS_munmap, range->start, range->end - range->start) == 0);
    }
    pattern = 0;
    refusals = 0;
    lost_pages = false;
    limit = SIZE_MAX;
    left = MACHINE_BYTES;
}

void kernel_refuse(uint32_t new_pattern) {
    pattern = new_pattern;
}

void kernel_limit(size_t bytes) {
    limit = bytes;
}

void kernel_leave(size_t bytes) {
    left = bytes;
}

void kernel_keep(bool keep) {
    keeps = keep;
}

size_t kernel_mapped(void) {
    return mapped_count;
}

size_t kernel_refusals(void) {
    return refusals;
}

bool kernel_has_lost_pages(void) {
    return lost_pages;
}

static bool refuses(void) {
    bool refused = (pattern & 1) != 0;
    pattern >>= 1;
    refusals += refused;
    return refused;
}

/* ---- mappings come and go ---- */

void *__real_vm_reserve(size_t bytes);
void *__wrap_vm_reserve(size_t bytes);
void *__real_vm_map(size_t bytes);
void *__wrap_vm_map(size_t bytes);
void __real_vm_release(void *base, size_t bytes);
void __wrap_vm_release(void *base, size_t bytes);
void __real_address_range_trim(struct address_range *range, size_t bytes);
void __wrap_address_range_trim(struct address_range *range, size_t bytes);

static void *note(void *base, size_t bytes) {
    if (base != NULL && !keeps) {
        uintptr_t guard = vm_page_size();
        note_mapped((uintptr_t)base - guard, (uintptr_t)base + vm_round_up(bytes) + guard);
    }
    return base;
}

void *__wrap_vm_reserve(size_t bytes) {
    return refuses() ? NULL : note(__real_vm_reserve(bytes), bytes);
}

void *__wrap_vm_map(size_t bytes) {
    return refuses() ? NULL : note(__real_vm_map(bytes), bytes);
}

void __wrap_vm_release(void *base, size_t bytes) {
    uintptr_t guard = vm_page_size();
    note_unmapped((uintptr_t)base - guard, (uintptr_t)base + vm_round_up(bytes) + guard);
    __real_vm_release(base, bytes);
}

void __wrap_address_range_trim(struct address_range *range, size_t bytes) {
    uintptr_t end = (uintptr_t)range->base + range->reserved;
    __real_address_range_trim(range, bytes);
    uintptr_t guard = vm_page_size();
    note_unmapped((uintptr_t)range->base + range->reserved + guard, end + guard);
}

/* ---- what may be refused ---- */

#define REFUSABLE(type, name, parameters, arguments)          \
    type __real_##name parameters;                            \
    type __wrap_##name parameters;                            \
    type __wrap_##name parameters {                           \
        return refuses() ? (type)0 : __real_##name arguments; \
    }

REFUSABLE(bool, vm_commit, (void *base, size_t bytes), (base, bytes))
REFUSABLE(bool, vm_commit_next, (void *base, size_t bytes), (base, bytes))
REFUSABLE(bool, vm_decommit, (void *base, size_t bytes), (base, bytes))
REFUSABLE(bool, vm_prefault, (void *base, size_t bytes), (base, bytes))
REFUSABLE(bool, vm_enable_huge_pages, (void *base, size_t bytes), (base, bytes))
REFUSABLE(bool, vm_move_pages, (void *from, void *to, size_t bytes), (from, to, bytes))

bool __real_vm_replace(void *base, size_t bytes);
bool __wrap_vm_replace(void *base, size_t bytes);

/* The target of a move that failed is lost if it cannot be mapped again (arena/large.c). */
bool __wrap_vm_replace(void *base, size_t bytes) {
    bool lost = refuses();
    lost_pages |= lost;
    return !lost && __real_vm_replace(base, bytes);
}

enum vm_renewed __real_vm_renew(void *base, size_t bytes);
enum vm_renewed __wrap_vm_renew(void *base, size_t bytes);

/* A range for which a new mapping is refused may be restored, or stay unusable. */
enum vm_renewed __wrap_vm_renew(void *base, size_t bytes) {
    if (!refuses()) {
        return __real_vm_renew(base, bytes);
    }
    bool lost = refuses();
    lost_pages |= lost;
    return lost ? VM_UNUSABLE : VM_RESTORED;
}

struct purge_result __real_purge_ranges(const struct iovec *ranges, size_t count);
struct purge_result __wrap_purge_ranges(const struct iovec *ranges, size_t count);

/* Each range takes a bit; the first that is refused ends the purge. */
struct purge_result __wrap_purge_ranges(const struct iovec *ranges, size_t count) {
    size_t allowed = 0;
    while (allowed < count && !refuses()) {
        allowed++;
    }
    struct purge_result result = {0};
    if (allowed > 0 || count == 0) {
        result = __real_purge_ranges(ranges, allowed);
    }
    if (allowed < count && result.error == 0) {
        result.error = EINVAL;
    }
    return result;
}

/* Bare threads would make a run depend on the scheduler: a target does their work itself. */
bool __wrap_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes);

bool __wrap_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes) {
    (void)thread, (void)body, (void)argument, (void)stack_bytes;
    return false;
}

/* ---- what the machine has ---- */

size_t __wrap_vm_limit_bytes(void);
size_t __wrap_memory_available_bytes(const char *root, size_t *of);

size_t __wrap_vm_limit_bytes(void) {
    return limit;
}

size_t __wrap_memory_available_bytes(const char *root, size_t *of) {
    (void)root;
    *of = MACHINE_BYTES;
    return left;
}
