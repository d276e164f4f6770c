#include "os/rseq.h"

#include "os/filters.h"
#include "os/signals.h"
#include "os/syscall.h"

#include <errno.h>
#include <pthread.h>
#include <sys/auxv.h>

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

static bool is_by_c_library(void) {
    return &__rseq_offset != NULL && &__rseq_size != NULL;
}

/* struct rseq of linux/rseq.h, of the first size, which all kernels accept. */
static _Thread_local struct {
    uint32_t cpu_id_start;
    int32_t cpu_id;
    uint64_t sequence;
    uint32_t flags;
    uint32_t node_id;
    int32_t mm_cid;
    uint32_t unused;
} own_area __attribute__((aligned(32), tls_model("initial-exec"))) = {.cpu_id = RSEQ_UNREGISTERED,
                                                                      .mm_cid = RSEQ_UNREGISTERED};
_Static_assert(sizeof own_area == RSEQ_MIN_AREA_BYTES && offsetof(typeof(own_area), mm_cid) == RSEQ_MM_CID,
               "as in linux/rseq.h");

static void forget_registration(void) {
    own_area.cpu_id = RSEQ_ENDED;
    own_area.mm_cid = RSEQ_ENDED;
}

/* No handler may find the number 0 that the kernel leaves. */
void rseq_end(void) {
    if (filters_now() != FILTERS_ADDED) {
        uint64_t mask = thread_block_signals();
        os_syscall(SYS_rseq, &own_area, sizeof own_area, RSEQ_UNREGISTER, RSEQ_SIGNATURE);
        forget_registration();
        thread_set_signals(mask);
    }
}

/* Before a thread of glibc has left the kernel for the last time, its memory is
 * not unmapped. A detached thread of musl unmaps its own stack and thread-local
 * storage, to which the kernel would write if it interrupted the thread then. */
#ifndef __GLIBC__

static pthread_key_t end_key;

static void end_thread(void *unused) {
    (void)unused;
    rseq_end();
}

static bool prepare_end(void) {
    static bool prepared;
    prepared = prepared || pthread_key_create(&end_key, end_thread) == 0;
    return prepared;
}

static bool note_registration(void) {
    return pthread_setspecific(end_key, &own_area) == 0;
}

#else

static bool prepare_end(void) {
    return true;
}

static bool note_registration(void) {
    return true;
}

#endif

/* A handler that interrupts this function may register the area first. */
bool rseq_register(void) {
    long result = -EPERM;
    if (filters_now() != FILTERS_ADDED && note_registration()) {
        result = os_syscall(SYS_rseq, &own_area, sizeof own_area, 0, RSEQ_SIGNATURE);
    }
    if (result != 0 && result != -EBUSY) {
        forget_registration();
        return false;
    }
    return true;
}

ptrdiff_t rseq_area_offset(void) {
    return &__rseq_offset != NULL ? __rseq_offset : (char *)&own_area - (char *)thread_pointer();
}

struct rseq_offsets rseq_find(void) {
    ptrdiff_t begin = rseq_area_offset();
    struct rseq_offsets offsets = {.own = !is_by_c_library(), .sequence = begin + RSEQ_CS};
    if (offsets.own) {
        offsets.area_bytes = sizeof own_area;
        offsets.usable = prepare_end() && rseq_register();
    } else {
        offsets.area_bytes = __rseq_size > RSEQ_MIN_AREA_BYTES ? __rseq_size : RSEQ_MIN_AREA_BYTES;
        const char *area = (const char *)thread_pointer() + begin;
        offsets.usable =
            __rseq_size != 0 && *(const volatile int32_t *)(const void *)(area + RSEQ_CPU_ID) >= 0;
    }
    unsigned long features = getauxval(AT_RSEQ_FEATURE_SIZE);
    offsets.cpu_number = begin + (features >= RSEQ_MM_CID + 4 ? RSEQ_MM_CID : RSEQ_CPU_ID);
    offsets.node = features >= RSEQ_NODE_ID + 4 ? begin + RSEQ_NODE_ID : 0;
#ifdef CALM_WITHOUT_RSEQ
    offsets.usable = false;
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
