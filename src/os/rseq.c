#include "os/rseq.h"

#include "os/filters.h"
#include "os/syscall.h"

#include <sys/auxv.h>

#ifndef AT_RSEQ_FEATURE_SIZE
#define AT_RSEQ_FEATURE_SIZE 27
#endif
#define RSEQ_NODE_ID        20
#define RSEQ_MM_CID         24
#define RSEQ_MIN_AREA_BYTES 32

/* from linux/membarrier.h of Linux 5.10 */
#define MEMBARRIER_PRIVATE_EXPEDITED_RSEQ          128
#define MEMBARRIER_REGISTER_PRIVATE_EXPEDITED_RSEQ 256

/* glibc 2.35 and later define these. Other C libraries do not, and leave
 * threads unregistered. */
extern const ptrdiff_t __rseq_offset __attribute__((weak));
extern const unsigned int __rseq_size __attribute__((weak));

struct rseq_offsets rseq_find(void) {
    struct rseq_offsets offsets = {0};
#if defined(__x86_64__) && !defined(CALM_WITHOUT_RSEQ)
    /* NOLINTNEXTLINE(bugprone-redundant-branch-condition): both may be missing */
    if (&__rseq_offset == NULL || &__rseq_size == NULL || __rseq_size == 0) {
        return offsets;
    }
    offsets.area = __rseq_offset;
    offsets.area_bytes = __rseq_size > RSEQ_MIN_AREA_BYTES ? __rseq_size : RSEQ_MIN_AREA_BYTES;
    const char *area = (const char *)thread_pointer() + offsets.area;
    if ((int)*(const volatile uint32_t *)(const void *)(area + RSEQ_CPU_ID) < 0) {
        return offsets;
    }
    unsigned long features = getauxval(AT_RSEQ_FEATURE_SIZE);
    offsets.cpu_number = offsets.area + (features >= RSEQ_MM_CID + 4 ? RSEQ_MM_CID : RSEQ_CPU_ID);
    offsets.node = features >= RSEQ_NODE_ID + 4 ? offsets.area + RSEQ_NODE_ID : 0;
    offsets.usable = true;
#endif
    return offsets;
}

static bool membarrier(long command) {
    return os_syscall(SYS_membarrier, command) == 0;
}

bool rseq_can_restart(void) {
    return membarrier(MEMBARRIER_REGISTER_PRIVATE_EXPEDITED_RSEQ);
}

bool rseq_restart_all(void) {
    if (filters_now() == FILTERS_ADDED) {
        return false;
    }
    /* The call fails in a process that is not registered yet, for example in a
     * forked child. */
    return membarrier(MEMBARRIER_PRIVATE_EXPEDITED_RSEQ) ||
           (membarrier(MEMBARRIER_REGISTER_PRIVATE_EXPEDITED_RSEQ) &&
            membarrier(MEMBARRIER_PRIVATE_EXPEDITED_RSEQ));
}
