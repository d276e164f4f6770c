#include "os/cpus.h"

#include "os/file.h"
#include "os/filters.h"
#include "os/syscall.h"

#include <sys/auxv.h>

#ifndef AT_RSEQ_FEATURE_SIZE
#define AT_RSEQ_FEATURE_SIZE 27
#endif
#define RSEQ_CPU_ID  4
#define RSEQ_NODE_ID 20
#define RSEQ_MM_CID  24

/* linux/membarrier.h of Linux 5.10 */
#define MEMBARRIER_PRIVATE_EXPEDITED_RSEQ          128
#define MEMBARRIER_REGISTER_PRIVATE_EXPEDITED_RSEQ 256

/* One more than the last number of a list such as "0-3,8-11"; 0 if there is none. */
static unsigned end_of_list(const char *path) {
    char text[256];
    long length = file_read(path, text, sizeof text);
    unsigned last = 0;
    bool any = false;
    for (long i = 0; i < length; i++) {
        if (text[i] >= '0' && text[i] <= '9') {
            last = (any ? last * 10 : 0) + (unsigned)(text[i] - '0');
            any = true;
        } else if (text[i] != '\n') {
            last = 0;
        }
    }
    return any ? last + 1 : 0;
}

unsigned cpus_possible(void) {
    unsigned listed = end_of_list("/sys/devices/system/cpu/possible");
    /* The kernel fills a mask of all it could have, in whole words: a container may show another list. */
    unsigned long mask[1024 / sizeof(unsigned long)] = {0};
    long filled = os_syscall(SYS_sched_getaffinity, 0, sizeof mask, (long)mask, 0, 0, 0);
    unsigned could = filled > 0 ? (unsigned)filled * 8 : 8192;
    return listed > could - 64 && listed <= could ? listed : could;
}

unsigned nodes_possible(void) {
    unsigned listed = end_of_list("/sys/devices/system/node/possible");
    return listed > 0 ? listed : 1;
}

/* glibc 2.35 and later; others leave them undefined, and the threads unregistered. */
extern const ptrdiff_t __rseq_offset __attribute__((weak));
extern const unsigned int __rseq_size __attribute__((weak));

struct rseq_place rseq_find(void) {
    struct rseq_place place = {0};
#if defined(__x86_64__) && !defined(CALM_WITHOUT_RSEQ)
    /* NOLINTNEXTLINE(bugprone-redundant-branch-condition): both may be missing */
    if (&__rseq_offset == NULL || &__rseq_size == NULL || __rseq_size == 0) {
        return place;
    }
    place.area = __rseq_offset;
    const char *area = (const char *)thread_pointer() + place.area;
    if ((int)*(const volatile uint32_t *)(const void *)(area + RSEQ_CPU_ID) < 0) {
        return place;
    }
    unsigned long features = getauxval(AT_RSEQ_FEATURE_SIZE);
    place.cpu_number = place.area + (features >= RSEQ_MM_CID + 4 ? RSEQ_MM_CID : RSEQ_CPU_ID);
    place.node = features >= RSEQ_NODE_ID + 4 ? place.area + RSEQ_NODE_ID : 0;
    place.usable = true;
#endif
    return place;
}

bool rseq_restart_all(void) {
    if (filters_now() == FILTERS_ADDED) {
        return false;
    }
    if (os_syscall(SYS_membarrier, MEMBARRIER_PRIVATE_EXPEDITED_RSEQ, 0, 0, 0, 0, 0) == 0) {
        return true;
    }
    /* Not registered, or a forked child, which is not either. */
    return os_syscall(SYS_membarrier, MEMBARRIER_REGISTER_PRIVATE_EXPEDITED_RSEQ, 0, 0, 0, 0, 0) == 0 &&
           os_syscall(SYS_membarrier, MEMBARRIER_PRIVATE_EXPEDITED_RSEQ, 0, 0, 0, 0, 0) == 0;
}
