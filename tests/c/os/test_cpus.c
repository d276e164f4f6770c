/* CPUs that a process may use and has used, and the clocks of CPU time. */
#include "os/cpus.h"

#include "os/clock.h"
#include "os/filters.h"
#include "os/rseq.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "test_clock.h"

#define SECOND_NS 1000000000ULL

/* Counts by glibc's way, to be compared with ours. */
static unsigned affinity_by_glibc(void) {
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    return (unsigned)CPU_COUNT(&set);
}

static void test_affinity(void) {
    errno = KEPT_ERRNO;
    CHECK_EQUAL(cpu_affinity_count(), affinity_by_glibc());
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &set)) {
        cpu++;
    }
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    CHECK(sched_setaffinity(0, sizeof set, &set) == 0);
    CHECK_EQUAL(cpu_affinity_count(), 1);
    struct cpu_usage usage = {0};
    CHECK(cpu_usage_sample(&usage) == 1.0);
    CHECK(cpu_usage_sample(&usage) == 1.0);
    CHECK(errno == KEPT_ERRNO);
}

static void use_cpus(double cpus, uint64_t ns) {
    clock_advance(ns);
    clock_use_cpu((uint64_t)(cpus * (double)ns), 0);
}

/* A filter that is added while a thread measures forbids the clock that it began with. */
static void test_stopwatch(void) {
    clock_stop();
    struct stopwatch watch = stopwatch_start();
    clock_use_cpu(0, 5 * CLOCK_MS);
    clock_advance(100 * CLOCK_MS);
    CHECK_EQUAL(stopwatch_ns(&watch), 5 * CLOCK_MS);
    filters_set(FILTERS_ADDED);
    CHECK_EQUAL(stopwatch_ns(&watch), 0);
    watch = stopwatch_start();
    clock_advance(7 * CLOCK_MS);
    CHECK_EQUAL(stopwatch_ns(&watch), 7 * CLOCK_MS);
}

static void test_cpu_usage(void) {
    struct cpu_usage usage = {0};
    double all = affinity_by_glibc();
    clock_stop();
    errno = KEPT_ERRNO;
    CHECK(cpu_usage_sample(&usage) == all);
    use_cpus(0.25, SECOND_NS / 2);
    CHECK(cpu_usage_sample(&usage) == all);
    use_cpus(0.25, SECOND_NS / 2 - 1);
    CHECK(cpu_usage_sample(&usage) == all); /* until a first full second has passed */
    use_cpus(0.25, 1);
    CHECK(fabs(cpu_usage_sample(&usage) - 0.25) < 1e-6);
    /* Over the time that has passed since, once that is a second again. */
    use_cpus(1, SECOND_NS - 1);
    CHECK(fabs(cpu_usage_sample(&usage) - 0.25) < 1e-6);
    use_cpus(2, 2 * SECOND_NS + 1);
    double busy = cpu_usage_sample(&usage);
    CHECK(fabs(busy - 5.0 / 3) < 1e-6);
    CHECK(cpu_usage_sample(&usage) == busy);
    use_cpus(0, 9 * SECOND_NS);
    CHECK(cpu_usage_sample(&usage) == 0);
    CHECK(errno == KEPT_ERRNO);
}

static uint64_t process_ns(void) {
    struct timespec used;
    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) == 0);
    return (uint64_t)used.tv_sec * SECOND_NS + (uint64_t)used.tv_nsec;
}

/* By the kernel's own clocks: a process that has used so much CPU time has, in its sample, too. */
static void test_cpu_usage_of_this_process(void) {
    struct cpu_usage usage = {0};
    uint64_t start = process_ns();
    cpu_usage_sample(&usage);
    CHECK(usage.sampled_cpu_ns >= start && usage.sampled_cpu_ns <= process_ns());
    while (process_ns() - usage.sampled_cpu_ns < SECOND_NS / 50) {
    }
    struct cpu_usage before = usage;
    usage.sampled_wall_ns -= SECOND_NS; /* as if it had idled before */
    uint64_t least = process_ns() - before.sampled_cpu_ns;
    double cpus = cpu_usage_sample(&usage);
    uint64_t most = process_ns() - before.sampled_cpu_ns;
    double seconds = 1 + (double)(usage.sampled_wall_ns - before.sampled_wall_ns) / SECOND_NS;
    CHECK(usage.sampled_wall_ns >= before.sampled_wall_ns);
    CHECK(cpus * seconds * SECOND_NS >= (double)least - 1 && cpus * seconds * SECOND_NS <= (double)most + 1);
}

static void test_cpu_clock_backwards(void) {
    clock_stop();
    struct cpu_usage ahead = {.sampled_wall_ns = clock_now_ns() + 1000 * SECOND_NS, .cpus = 99};
    CHECK(cpu_usage_sample(&ahead) == affinity_by_glibc());
    CHECK_EQUAL(ahead.sampled_wall_ns, clock_now_ns());
    CHECK(cpu_usage_sample(&ahead) == affinity_by_glibc());

    struct cpu_usage used = {
        .sampled_wall_ns = clock_now_ns() - 2 * SECOND_NS, .sampled_cpu_ns = UINT64_MAX, .cpus = 99};
    CHECK(cpu_usage_sample(&used) == affinity_by_glibc());
    CHECK(used.sampled_cpu_ns < UINT64_MAX);
}

static void test_cpus(void) {
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    unsigned possible = cpus_possible();
    CHECK(possible >= (unsigned)sysconf(_SC_NPROCESSORS_CONF));
    for (unsigned cpu = possible; cpu < CPU_SETSIZE; cpu++) {
        CHECK(!CPU_ISSET(cpu, &set));
    }
    CHECK(possible <= 8192);
    CHECK(nodes_possible() >= 1 && nodes_possible() <= 1024);
    CHECK(cpus_listed() >= cpu_affinity_count() && cpus_listed() <= cpus_possible());
    struct rseq_offsets place = rseq_find();
    if (place.usable) {
        for (int i = 0; i < 1000; i++) {
            const char *number = (const char *)thread_pointer() + place.cpu_number;
            CHECK(*(const volatile uint32_t *)(const void *)number < possible);
        }
        CHECK(rseq_restart_all());
    }
}

int main(void) {
    filters_detect();
    in_child(test_affinity);
    in_child(test_stopwatch);
    in_child(test_cpu_usage);
    in_child(test_cpu_usage_of_this_process);
    in_child(test_cpu_clock_backwards);
    test_cpus();
    return 0;
}
