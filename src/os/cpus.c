#include "os/cpus.h"

#include "base/size.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/filters.h"
#include "os/syscall.h"

#include <string.h>

unsigned cpu_set_count(const struct cpu_set *set) {
    unsigned count = 0;
    for (unsigned i = 0; i < MAX_CPUS / 64; i++) {
        count += count_bits(set->words[i]);
    }
    return count;
}

unsigned cpu_set_next(const struct cpu_set *set, unsigned from) {
    for (unsigned word = from / 64; word < MAX_CPUS / 64; word++) {
        uint64_t rest = set->words[word] & (word == from / 64 ? ~(uint64_t)0 << from % 64 : ~(uint64_t)0);
        if (rest != 0) {
            return word * 64 + (unsigned)__builtin_ctzll(rest);
        }
    }
    return MAX_CPUS;
}

/* Adds the CPUs in one part of a list, such as "3" or "8-11". */
static bool add_part(void *context, const char *part) {
    uint64_t first;
    uint64_t last;
    const char *end = parse_number(part, &first);
    bool valid = end != part;
    last = first;
    if (*end == '-') {
        valid = valid && parse_number(end + 1, &last) != end + 1;
    }
    for (; valid && first <= last && first < MAX_CPUS; first++) {
        cpu_set_add(context, (unsigned)first);
    }
    return valid;
}

bool cpu_set_read(struct cpu_set *set, const char *path) {
    memset(set, 0, sizeof *set);
    file_each_part(path, ',', add_part, set);
    return cpu_set_next(set, 0) < MAX_CPUS;
}

unsigned cpu_affinity(int thread, struct cpu_set *set) {
    memset(set, 0, sizeof *set);
    /* The kernel returns the number of bytes that it stored: whole words with a
     * bit for each CPU that it could have on this machine. */
    long filled = os_syscall(SYS_sched_getaffinity, thread, sizeof *set, set);
    return filled > 0 ? (unsigned)filled * 8 : 0;
}

unsigned cpu_affinity_count(void) {
    struct cpu_set set;
    cpu_affinity(0, &set);
    unsigned count = cpu_set_count(&set);
    return count > 0 ? count : 1;
}

bool cpu_pin(unsigned cpu) {
    struct cpu_set one = {0};
    cpu_set_add(&one, cpu);
    return os_syscall(SYS_sched_setaffinity, 0, sizeof one, &one) == 0;
}

/* Returns one more than the highest number of a list, or 0 if the list is
 * empty. */
static unsigned end_of_list(const char *path) {
    struct cpu_set listed;
    unsigned end = 0;
    cpu_set_read(&listed, path);
    for (unsigned next = 0; (next = cpu_set_next(&listed, next)) < MAX_CPUS; next++) {
        end = next + 1;
    }
    return end;
}

unsigned cpus_possible(void) {
    struct cpu_set set;
    unsigned possible = cpu_affinity(0, &set);
    return possible > 0 ? possible : MAX_CPUS;
}

#define MASK_LABEL "Cpus_allowed:"

/* Counts the bits of a mask. The kernel writes the mask in hexadecimal digits,
 * in groups of eight, with one bit for each CPU that it could have on this
 * machine. */
static bool count_mask_bits(void *context, const char *line) {
    size_t label = strlen(MASK_LABEL);
    if (strncmp(line, MASK_LABEL, label) != 0) {
        return true;
    }
    for (const char *at = line + label; *at != '\0'; at++) {
        bool digit = (*at >= '0' && *at <= '9') || (*at >= 'a' && *at <= 'f');
        *(unsigned *)context += digit ? 4 : 0;
    }
    return false;
}

unsigned cpus_listed(void) {
    unsigned listed = end_of_list("/sys/devices/system/cpu/possible");
    /* The list in a container may end below the numbers of its CPUs. */
    unsigned possible = cpus_possible();
    unsigned bits = 0;
    file_each_part("/proc/self/status", '\n', count_mask_bits, &bits);
    possible = bits > 0 && bits < possible ? bits : possible;
    return listed + 64 > possible && listed <= possible ? listed : possible;
}

unsigned nodes_possible(void) {
    unsigned listed = end_of_list("/sys/devices/system/node/possible");
    return listed > 0 ? listed : 1;
}

/* ---- how many the process uses ---- */

double cpu_usage_sample(struct cpu_usage *usage) {
    if (filters_now() == FILTERS_ADDED) { /* the filter may forbid the system calls below */
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
