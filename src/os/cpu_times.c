#include "os/cpu_times.h"

#include "base/size.h"
#include "os/file.h"
#include "os/parse.h"
#include "os/text.h"

#include <string.h>

#define MIN_TICKS 5 /* between two samples that say something */

/* The columns of a line that make up all of a CPU's time: user, nice, system, idle, iowait, irq, softirq,
 * steal. Those that follow are parts of the first two. */
enum { COLUMN_IDLE = 3, COLUMN_IOWAIT = 4, COLUMNS = 8 };

/* The lines of CPUs come first, in order. The rest is long and is not read. */
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
    for (; times->cpus <= cpu; times->cpus++) {
        times->of[times->cpus].idle = 0;
        times->of[times->cpus].total = 0;
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
    /* The kernel corrects itself: idle time may go back, and run ahead. */
    uint64_t idle = size_minus(after->of[cpu].idle, known ? before->of[cpu].idle : 0);
    return idle >= total ? 100 : (unsigned)((double)idle * 100 / (double)total);
}
