#include "os/cpu_usage.h"

#include "os/clock.h"
#include "os/cpus.h"
#include "os/filters.h"

double cpu_usage_sample(struct cpu_usage *usage) {
    if (filters_now() == FILTERS_ADDED) { /* which may forbid the system calls below */
        return usage->cpus > 0 ? usage->cpus : 1;
    }
    uint64_t wall = clock_read_ns(CLOCK_MONOTONIC);
    bool first = usage->sampled_wall_ns == 0;
    if (!first && wall - usage->sampled_wall_ns < CLOCK_NS_PER_S) {
        return usage->cpus;
    }
    uint64_t cpu = clock_read_ns(CLOCK_PROCESS_CPUTIME_ID);
    bool forward = !first && wall > usage->sampled_wall_ns && cpu >= usage->sampled_cpu_ns;
    usage->cpus = forward ? (double)(cpu - usage->sampled_cpu_ns) / (double)(wall - usage->sampled_wall_ns)
                          : cpu_affinity_count();
    usage->sampled_cpu_ns = cpu;
    usage->sampled_wall_ns = wall;
    return usage->cpus;
}
