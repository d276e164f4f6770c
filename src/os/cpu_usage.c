#include "os/cpu_usage.h"

#include "os/clock.h"
#include "os/filters.h"
#include "os/syscall.h"

#define NS_PER_S 1000000000ULL

void cpu_mask_read(struct cpu_mask *mask) {
    /* The raw call reports how many bytes the kernel filled, whatever its NR_CPUS (at most 8192). */
    long filled = os_syscall(SYS_sched_getaffinity, 0, sizeof mask->words, (long)mask->words, 0, 0, 0);
    mask->bytes = filled > 0 ? (size_t)filled : 0;
}

unsigned cpu_affinity_count(void) {
    struct cpu_mask mask = {.bytes = 0};
    cpu_mask_read(&mask);
    unsigned count = 0;
    for (size_t i = 0; i < mask.bytes / sizeof mask.words[0]; i++) {
        count += (unsigned)__builtin_popcountl(mask.words[i]);
    }
    return count > 0 ? count : 1;
}

double cpu_usage_sample(struct cpu_usage *usage) {
    if (filters_now() == FILTERS_ADDED) {
        return usage->cpus > 0 ? usage->cpus : 1; /* by system calls it is had */
    }
    uint64_t wall = clock_read_ns(CLOCK_MONOTONIC);
    if (usage->sampled_wall_ns == 0) {
        usage->cpus = cpu_affinity_count();
        usage->sampled_cpu_ns = clock_read_ns(CLOCK_PROCESS_CPUTIME_ID);
        usage->sampled_wall_ns = wall;
    } else if (wall - usage->sampled_wall_ns >= NS_PER_S) {
        uint64_t cpu = clock_read_ns(CLOCK_PROCESS_CPUTIME_ID);
        if (wall > usage->sampled_wall_ns && cpu >= usage->sampled_cpu_ns) {
            usage->cpus = (double)(cpu - usage->sampled_cpu_ns) / (double)(wall - usage->sampled_wall_ns);
        } else {
            usage->cpus = cpu_affinity_count();
        }
        usage->sampled_cpu_ns = cpu;
        usage->sampled_wall_ns = wall;
    }
    return usage->cpus;
}
