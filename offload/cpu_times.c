#include "offload/cpu_times.h"

#include "base/size.h"
#include "os/file.h"
#include "os/syscall.h"
#include "os/text.h"

#include <string.h>

/* ---- CPUs ---- */

#define MIN_TICKS 5 /* samples with fewer ticks between them give no result */

/* These columns of a line add up to a CPU's time: user, nice, system, idle,
 * iowait, irq, softirq, steal. The columns behind them are parts of the first
 * two. */
enum { COLUMN_IDLE = 3, COLUMN_IOWAIT = 4, COLUMNS = 8 };

/* The lines of CPUs come first, in order. The long rest of the file is not
 * read. */
static bool take_line(void *context, const char *line) {
    struct cpu_times *times = context;
    uint64_t cpu;
    if (strncmp(line, "cpu", 3) != 0) {
        return false;
    }
    const char *at = parse_number(line + 3, &cpu);
    if (at == line + 3 || cpu >= MAX_CPUS || cpu < times->cpus) {
        return true;
    }
    while (times->cpus <= cpu) {
        memset(&times->of[times->cpus++], 0, sizeof times->of[0]);
    }
    for (int column = 0; column < COLUMNS; column++) {
        uint64_t ticks;
        const char *digits = at + strspn(at, " ");
        at = parse_number(digits, &ticks);
        if (at == digits) {
            break;
        }
        times->of[cpu].total += ticks;
        if (column == COLUMN_IDLE || column == COLUMN_IOWAIT) {
            times->of[cpu].idle += ticks;
        }
    }
    return true;
}

bool cpu_times_sample(const char *root, struct cpu_times *times) {
    char path[FILE_MAX_PATH];
    times->cpus = 0;
    file_each_part(text_print(path, sizeof path, "%s/proc/stat", root), '\n', take_line, times);
    return times->cpus > 0;
}

unsigned cpu_times_idle_percent(const struct cpu_times *before, const struct cpu_times *after, unsigned cpu) {
    if (cpu >= after->cpus) {
        return CPU_IDLE_UNKNOWN;
    }
    bool known = cpu < before->cpus;
    uint64_t total = size_minus(after->of[cpu].total, known ? before->of[cpu].total : 0);
    if (total < MIN_TICKS) {
        return CPU_IDLE_UNKNOWN;
    }
    /* The kernel corrects its idle times. They may decrease, and may exceed the
     * total. */
    uint64_t idle = size_minus(after->of[cpu].idle, known ? before->of[cpu].idle : 0);
    return idle >= total ? 100 : (unsigned)((double)idle * 100 / (double)total);
}

/* ---- threads ---- */

#define BUSY_SHARE 4 /* a CPU with less than a quarter of the busiest CPU's load does not count */

/* Fields of /proc/.../stat, counted from the state. */
enum { FIELD_STATE, FIELD_UTIME = 11, FIELD_STIME = 12, FIELD_PROCESSOR = 36 };

static void sample_task(const char *root, uint64_t thread, struct task_times *times) {
    char path[FILE_MAX_PATH];
    char text[1024];
    text_print(path, sizeof path, "%s/proc/self/task/%lu/stat", root, thread);
    if (file_read(path, text, sizeof text) <= 0) {
        return; /* the thread has just ended */
    }
    uint64_t user;
    uint64_t system;
    uint64_t cpu;
    const char *processor = parse_stat_field(text, FIELD_PROCESSOR);
    if (parse_number(processor, &cpu) == processor || cpu >= MAX_CPUS) {
        return;
    }
    parse_number(parse_stat_field(text, FIELD_UTIME), &user);
    parse_number(parse_stat_field(text, FIELD_STIME), &system);
    times->tasks[times->count].thread = (int32_t)thread;
    times->tasks[times->count].cpu = (uint32_t)cpu;
    times->tasks[times->count].ticks = user + system;
    times->tasks[times->count].running = *parse_stat_field(text, FIELD_STATE) == 'R';
    times->count++;
}

/* Offsets in struct linux_dirent64, which no header of the C library
 * defines. */
enum { ENTRY_LENGTH = 16, ENTRY_NAME = 19 };

bool task_times_sample(const char *root, int without_thread, struct task_times *times) {
    char path[FILE_MAX_PATH];
    _Alignas(8) char entries[1024];
    times->count = 0;
    long descriptor = file_open(text_print(path, sizeof path, "%s/proc/self/task", root));
    if (descriptor < 0) {
        return false;
    }
    long length;
    while (times->count < MAX_TASKS &&
           (length = os_syscall(SYS_getdents64, descriptor, entries, sizeof entries)) > 0) {
        uint16_t entry_length;
        for (long at = 0; at < length && times->count < MAX_TASKS; at += entry_length) {
            memcpy(&entry_length, entries + at + ENTRY_LENGTH, sizeof entry_length);
            uint64_t thread;
            const char *end = parse_number(entries + at + ENTRY_NAME, &thread);
            if (*end == '\0' && thread != 0 && thread <= INT32_MAX && thread != (uint64_t)without_thread) {
                sample_task(root, thread, times);
            }
        }
    }
    os_syscall(SYS_close, descriptor);
    return true;
}

static uint64_t ticks_of_thread(const struct task_times *times, int32_t thread) {
    for (uint32_t i = 0; i < times->count; i++) {
        if (times->tasks[i].thread == thread) {
            return times->tasks[i].ticks;
        }
    }
    return 0;
}

size_t task_times_busiest_cpus(const struct task_times *before, const struct task_times *after,
                               uint32_t *cpus, size_t max) {
    uint64_t loads[MAX_TASKS] = {0}; /* the load of a CPU is at the first task that last ran on it */
    for (uint32_t i = 0; i < after->count; i++) {
        uint64_t ticks = after->tasks[i].ticks;
        uint64_t ticks_before = ticks_of_thread(before, after->tasks[i].thread);
        /* If the ticks have decreased, another thread has the number now. */
        ticks = (ticks >= ticks_before ? ticks - ticks_before : ticks) + after->tasks[i].running;
        uint32_t first = 0;
        while (after->tasks[first].cpu != after->tasks[i].cpu) {
            first++;
        }
        loads[first] += ticks;
    }
    uint64_t highest = 0;
    size_t chosen = 0;
    while (chosen < max) {
        size_t busiest = 0;
        for (size_t i = 1; i < after->count; i++) {
            busiest = loads[i] > loads[busiest] ? i : busiest;
        }
        highest = chosen == 0 ? loads[busiest] : highest;
        if (loads[busiest] == 0 || loads[busiest] < highest / BUSY_SHARE) {
            break;
        }
        cpus[chosen++] = after->tasks[busiest].cpu;
        loads[busiest] = 0;
    }
    return chosen;
}
