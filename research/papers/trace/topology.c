#include "topology.h"

#include "bits.h"

#include <string.h>
#include <sys/syscall.h>
#include <time.h>

enum {
    RSEQ_UNREGISTER = 1,
    RESTART_SEQUENCES = 128, /* MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ */
    BITS_OF_BYTE = 8,
};

/* The start of struct rseq in linux/rseq.h, with what Linux 6.3 added. */
struct area {
    uint32_t cpu_id_start;
    uint32_t cpu_id;
    uint64_t sequence;
    uint32_t flags;
    uint32_t node_id;
    uint32_t mm_cid;
};

_Static_assert(TOPOLOGY_THREADS <= BITS, "each thread has a bit");

struct told {
    bool has_cpu;
    unsigned cpu;
    uint64_t area;      /* for restartable sequences, or 0 */
    bool is_new;        /* the area has no numbers yet */
    uint64_t answer[3]; /* arguments of the system call under way */
};

static unsigned cpu_count;
static unsigned node_count;
static ptrdiff_t base;
static bits used;
static struct told threads[TOPOLOGY_THREADS];

void topology_init(unsigned cpus, unsigned nodes) {
    cpu_count = cpus;
    node_count = nodes == 0 ? 1 : nodes;
}

void topology_set_base(ptrdiff_t distance) {
    base = distance;
}

static void *here(uint64_t address) {
    return (char *)NULL + address + base;
}

static void put(uint64_t address, uint32_t value) {
    if (address != 0) {
        memcpy(here(address), &value, sizeof value);
    }
}

/* The lowest CPU that no other thread has; or if there is none, any. A thread that never asks needs none. */
static unsigned cpu_of(unsigned thread) {
    struct told *told = &threads[thread];
    for (unsigned cpu = 0; !told->has_cpu && cpu < cpu_count; cpu++) {
        if ((used & bit_of(cpu)) == 0) {
            used |= bit_of(cpu);
            told->has_cpu = true;
            told->cpu = cpu;
        }
    }
    return told->has_cpu ? told->cpu : thread % cpu_count;
}

unsigned topology_node(unsigned thread) {
    return (threads[thread].has_cpu ? threads[thread].cpu : thread) % node_count;
}

static void put_mask(uint64_t address, uint64_t bytes) {
    if (bytes * BITS_OF_BYTE < cpu_count) {
        return;
    }
    unsigned char *mask = here(address);
    memset(mask, 0, bytes);
    for (unsigned cpu = 0; cpu < cpu_count; cpu++) {
        mask[cpu / BITS_OF_BYTE] |= (unsigned char)(1U << cpu % BITS_OF_BYTE);
    }
}

/* The CPU time of the process, as if each thread that has a CPU had run all the time. */
static struct timespec time_used(void) {
    enum { NS_PER_S = 1000000000 };
    static uint64_t last;
    static uint64_t sum;
    struct timespec read;
    (void)clock_gettime(CLOCK_MONOTONIC, &read);
    uint64_t now = (uint64_t)read.tv_sec * NS_PER_S + (uint64_t)read.tv_nsec;
    uint64_t passed = last == 0 ? 0 : now - last;
    for (unsigned cpu = 0; cpu < cpu_count; cpu++) {
        sum += (used & bit_of(cpu)) != 0 ? passed : 0;
    }
    last = now;
    return (struct timespec){.tv_sec = (time_t)(sum / NS_PER_S), .tv_nsec = (long)(sum % NS_PER_S)};
}

void topology_called(unsigned thread, int64_t number, const uint64_t arguments[3]) {
    struct told *told = &threads[thread];
    memcpy(told->answer, arguments, sizeof told->answer);
    if (number == SYS_rseq) {
        told->area = (arguments[2] & RSEQ_UNREGISTER) != 0 ? 0 : arguments[0];
        told->is_new = told->area != 0;
    }
}

void topology_stored(unsigned thread, uint64_t address) {
    struct told *told = &threads[thread];
    if (told->is_new && address == told->area + offsetof(struct area, cpu_id)) {
        unsigned cpu = cpu_of(thread);
        told->is_new = false;
        put(told->area + offsetof(struct area, cpu_id_start), cpu);
        put(told->area + offsetof(struct area, cpu_id), cpu);
        put(told->area + offsetof(struct area, node_id), topology_node(thread));
        put(told->area + offsetof(struct area, mm_cid), cpu);
    }
}

void topology_returned(unsigned thread, int64_t number, int64_t result) {
    const struct told *told = &threads[thread];
    if (number == SYS_sched_getaffinity && result > 0) {
        put_mask(told->answer[2], (uint64_t)result);
    } else if (number == SYS_getcpu && result == 0) {
        put(told->answer[0], cpu_of(thread));
        put(told->answer[1], topology_node(thread));
    } else if (number == SYS_clock_gettime && result == 0 &&
               (clockid_t)told->answer[0] == CLOCK_PROCESS_CPUTIME_ID) {
        struct timespec time = time_used();
        memcpy(here(told->answer[1]), &time, sizeof time);
    }
}

void topology_renew(void) {
    for (unsigned thread = 0; thread < TOPOLOGY_THREADS; thread++) {
        if (threads[thread].has_cpu && threads[thread].area != 0) {
            put(threads[thread].area + offsetof(struct area, cpu_id_start), threads[thread].cpu);
        }
    }
}

void topology_thread_ended(unsigned thread) {
    if (threads[thread].has_cpu) {
        used &= ~bit_of(threads[thread].cpu);
    }
    threads[thread] = (struct told){0};
}

bool topology_is_restart(int64_t number, uint64_t command) {
    return number == SYS_membarrier && command == RESTART_SEQUENCES;
}
