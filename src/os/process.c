#include "os/process.h"

#include "os/clock.h"
#include "os/filters.h"
#include "os/syscall.h"

struct process process_known;

static uint32_t number(void) {
    return filters_now() != FILTERS_ADDED ? (uint32_t)os_syscall(SYS_getpid) : 0;
}

void process_begin(void) {
    process_known = (struct process){.number = number(), .started_ns = clock_read_ns(CLOCK_REALTIME)};
}

/* No fork handler runs in a copy of the process that _Fork or clone makes. The
 * copy has a number of its own, but the start of its parent. */
struct process process_now(void) {
    struct process now = process_known;
    if (filters_now() != FILTERS_ADDED) {
        now.number = number();
        now.parent = (uint32_t)os_syscall(SYS_getppid);
    }
    return now;
}

void process_remember(void) {
    process_known = process_now();
}
