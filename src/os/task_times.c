#include "os/task_times.h"

#include "os/cpus.h"
#include "os/file.h"
#include "os/parse.h"
#include "os/syscall.h"
#include "os/text.h"

#include <fcntl.h>
#include <string.h>

#define BUSY_SHARE 4 /* of what the busiest CPU had, CPUs below a quarter do not count */

/* Fields of /proc/.../stat, counted from the state. */
enum { FIELD_STATE, FIELD_UTIME = 11, FIELD_STIME = 12, FIELD_PROCESSOR = 36 };

static void sample_task(const char *root, uint64_t thread, struct task_times *times) {
    char path[FILE_MAX_PATH];
    char text[1024];
    text_print(path, sizeof path, "%s/proc/self/task/%lu/stat", root, thread);
    if (file_read(path, text, sizeof text) <= 0) {
        return; /* it has just ended */
    }
    uint64_t user;
    uint64_t system;
    uint64_t cpu;
    const char *processor = parse_stat_field(text, FIELD_PROCESSOR);
    if (processor == NULL || parse_number(processor, &cpu) == processor || cpu >= MAX_CPUS) {
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

/* Of struct linux_dirent64, which is in no header of the C library. */
enum { ENTRY_LENGTH = 16, ENTRY_NAME = 19 };

bool task_times_sample(const char *root, int without_thread, struct task_times *times) {
    char path[FILE_MAX_PATH];
    _Alignas(8) char entries[1024];
    times->count = 0;
    text_print(path, sizeof path, "%s/proc/self/task", root);
    long descriptor = os_syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
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
    struct {
        uint32_t cpu;
        uint64_t ticks;
    } loads[MAX_TASKS];
    size_t count = 0;
    for (uint32_t i = 0; i < after->count; i++) {
        uint64_t ticks = after->tasks[i].ticks;
        uint64_t ticks_before = ticks_of_thread(before, after->tasks[i].thread);
        /* Less than before: the number is that of another thread now. */
        ticks = (ticks >= ticks_before ? ticks - ticks_before : ticks) + after->tasks[i].running;
        size_t at = 0;
        while (at < count && loads[at].cpu != after->tasks[i].cpu) {
            at++;
        }
        if (at == count) {
            loads[count].cpu = after->tasks[i].cpu;
            loads[count++].ticks = 0;
        }
        loads[at].ticks += ticks;
    }
    uint64_t highest = 0;
    size_t chosen = 0;
    while (chosen < max && count > 0) {
        size_t busiest = 0;
        for (size_t i = 1; i < count; i++) {
            busiest = loads[i].ticks > loads[busiest].ticks ? i : busiest;
        }
        highest = chosen == 0 ? loads[busiest].ticks : highest;
        if (loads[busiest].ticks == 0 || loads[busiest].ticks < highest / BUSY_SHARE) {
            break;
        }
        cpus[chosen++] = loads[busiest].cpu;
        loads[busiest].ticks = 0;
    }
    return chosen;
}
