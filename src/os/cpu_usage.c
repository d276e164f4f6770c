#include "os/cpu_usage.h"

#include "os/clock.h"
#include "os/syscall.h"

#define NS_PER_S 1000000000ULL

unsigned cpu_affinity_count(void) {
    /* The raw call reports how many bytes the kernel filled, whatever its NR_CPUS (at most 8192). */
    unsigned long mask[1024 / sizeof(unsigned long)] = {0};
    long filled = os_syscall(SYS_sched_getaffinity, 0, sizeof mask, (long)mask, 0, 0, 0);
    if (filled <= 0) {
        return 1;
    }
    unsigned count = 0;
    for (size_t i = 0; i < (size_t)filled / sizeof mask[0]; i++) {
        count += (unsigned)__builtin_popcountl(mask[i]);
    }
    return count > 0 ? count : 1;
}

double cpu_usage_sample(struct cpu_usage *usage) {
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
