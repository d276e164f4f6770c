#include "counters.h"

#include "files.h"

#include <errno.h>
#include <linux/perf_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/syscall.h>

#define TRACEPOINT(label, set, event, condition) \
    { .name = (label), .group = (set), .tracepoint = (event), .filter = (condition), .fd = -1, .value = -1 }
#define SYSCALL(call) TRACEPOINT(#call, GROUP_SYSCALLS, "syscalls/sys_enter_" #call, NULL)
#define HARDWARE(label, kind, what) \
    { .name = (label), .group = GROUP_HARDWARE, .type = (kind), .config = (what), .fd = -1, .value = -1 }
#define REASON(counter, ...) snprintf((counter)->reason, sizeof(counter)->reason, __VA_ARGS__)
#define CACHE_READ_MISS(cache) \
    ((cache) | (PERF_COUNT_HW_CACHE_OP_READ << 8) | (PERF_COUNT_HW_CACHE_RESULT_MISS << 16))

/*
 * The numbers are enum tlb_flush_reason of the kernel: 4 is one shootdown begun, however many CPUs it
 * concerns; 1 is one interrupt handled, charged to the thread that it interrupts, and only where there was
 * something left to flush. So the interrupts that a shootdown sends are counted at their sender: one
 * csd_queue_cpu for each CPU, which adds up to the same as the TLB row of /proc/interrupts. That tracepoint
 * is there since Linux 6.5.
 *
 * 0x10000 is CLONE_THREAD. Threads are counted beside shootdowns, since a C library gives a thread's stack
 * back when it ends, and this begins a shootdown that no allocator has a say in.
 */
struct counter counters[] = {
    TRACEPOINT("shootdowns", GROUP_TLB, "tlb/tlb_flush", "reason == 4"),
    TRACEPOINT("interrupts", GROUP_TLB, "csd/csd_queue_cpu", "func.function == flush_tlb_func"),
    TRACEPOINT("interrupts_received", GROUP_RECEIVED, "tlb/tlb_flush", "reason == 1"),
    TRACEPOINT("threads_started", GROUP_TLB, "task/task_newtask", "clone_flags & 0x10000"),
    SYSCALL(madvise),
    SYSCALL(process_madvise),
    SYSCALL(munmap),
    SYSCALL(mprotect),
    SYSCALL(brk),
    SYSCALL(mremap),
    SYSCALL(membarrier),
    HARDWARE("cycles", PERF_TYPE_HARDWARE, PERF_COUNT_HW_CPU_CYCLES),
    HARDWARE("instructions", PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS),
    HARDWARE("dtlb_load_misses", PERF_TYPE_HW_CACHE, CACHE_READ_MISS(PERF_COUNT_HW_CACHE_DTLB)),
    HARDWARE("llc_load_misses", PERF_TYPE_HW_CACHE, CACHE_READ_MISS(PERF_COUNT_HW_CACHE_LL)),
};

const unsigned counter_count = sizeof counters / sizeof counters[0];

static const char *const trace_roots[] = {"/sys/kernel/tracing", "/sys/kernel/debug/tracing"};
static const char *trace_root; /* NULL: no tracefs that this process may read */
static int trace_error;        /* why trace_root is NULL */

static bool find_trace_root(void) {
    trace_error = ENOENT;
    for (unsigned i = 0; i < sizeof trace_roots / sizeof trace_roots[0]; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s/events/header_event", trace_roots[i]);
        if (access(path, R_OK) == 0) {
            trace_root = trace_roots[i];
            return true;
        }
        if (errno == EACCES) {
            trace_error = EACCES;
        }
    }
    return false;
}

void counters_init(void) {
    if (find_trace_root() || geteuid() != 0) {
        return;
    }
    if (mount("tracefs", trace_roots[0], "tracefs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) == 0) {
        find_trace_root();
    } else {
        trace_error = errno;
    }
}

/* The number that perf_event_open knows the tracepoint by, or a negative errno. */
static long tracepoint_id(const char *tracepoint) {
    char path[128];
    char text[32];
    snprintf(path, sizeof path, "%s/events/%s/id", trace_root, tracepoint);
    ssize_t got = read_path(path, text, sizeof text);
    return got > 0 ? strtol(text, NULL, 10) : got < 0 ? -errno : -EIO;
}

static const char *error_name(int error) {
#ifdef __GLIBC__
    return strerrorname_np(error);
#else
    return strerror(error);
#endif
}

static void explain_open_failure(struct counter *counter, int error) {
    char level[16];
    switch (error) {
    case EACCES:
    case EPERM:
        if (read_path("/proc/sys/kernel/perf_event_paranoid", level, sizeof level) <= 0) {
            strcpy(level, "unknown");
        }
        REASON(counter,
               "perf_event_open: %s; kernel.perf_event_paranoid is %.*s: needs root, CAP_PERFMON or -1",
               error_name(error), (int)strcspn(level, "\n"), level);
        break;
    case ENOENT:
    case ENODEV:
    case EOPNOTSUPP:
        REASON(counter, "this machine has no such counter (%s)", error_name(error));
        break;
    default:
        REASON(counter, "perf_event_open: %s (%s)", error_name(error), strerror(error));
    }
}

static int perf_open(struct perf_event_attr *attr, pid_t pid) {
    return (int)syscall(SYS_perf_event_open, attr, pid, -1, -1, PERF_FLAG_FD_CLOEXEC);
}

static struct perf_event_attr attributes(uint32_t type, uint64_t config) {
    return (struct perf_event_attr){
        .type = type,
        .size = sizeof(struct perf_event_attr),
        .config = config,
        .disabled = 1,
        .inherit = 1,
        .enable_on_exec = 1,
        .exclude_hv = type != PERF_TYPE_TRACEPOINT,
        .read_format = PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING,
    };
}

static void open_tracepoint(struct counter *counter, pid_t pid) {
    if (trace_root == NULL) {
        REASON(counter,
               trace_error == EACCES ? "tracefs cannot be read (%s): needs root, or read access to %s"
                                     : "there is no tracefs (%s) at %s",
               error_name(trace_error), trace_roots[0]);
        return;
    }
    long id = tracepoint_id(counter->tracepoint);
    if (id < 0) {
        REASON(counter, id == -ENOENT ? "this kernel has no tracepoint %s (%s)" : "tracepoint %s: %s",
               counter->tracepoint, error_name((int)-id));
        return;
    }
    struct perf_event_attr attr = attributes(PERF_TYPE_TRACEPOINT, (uint64_t)id);
    counter->fd = perf_open(&attr, pid);
    if (counter->fd < 0) {
        explain_open_failure(counter, errno);
        return;
    }
    if (counter->filter != NULL && ioctl(counter->fd, PERF_EVENT_IOC_SET_FILTER, counter->filter) != 0) {
        REASON(counter, "this kernel refuses the filter \"%s\" (%s)", counter->filter, error_name(errno));
        close(counter->fd);
        counter->fd = -1;
    }
}

static void open_hardware(struct counter *counter, pid_t pid) {
    struct perf_event_attr attr = attributes(counter->type, counter->config);
    counter->fd = perf_open(&attr, pid);
    if (counter->fd < 0 && (errno == EACCES || errno == EPERM)) {
        /* A tracepoint would count nothing at all this way; a hardware event counts what user mode does. */
        attr.exclude_kernel = 1;
        counter->user_only = true;
        counter->fd = perf_open(&attr, pid);
    }
    if (counter->fd < 0) {
        explain_open_failure(counter, errno);
    }
}

void counters_open(pid_t pid, unsigned groups) {
    for (unsigned i = 0; i < counter_count; i++) {
        struct counter *counter = &counters[i];
        /* It comes right behind interrupts. */
        if (counter->group == GROUP_RECEIVED && (groups & GROUP_TLB) && counters[i - 1].fd < 0) {
            groups |= GROUP_RECEIVED;
        }
        if ((counter->group & groups) == 0) {
            REASON(counter, "not asked for");
        } else if (counter->tracepoint != NULL) {
            open_tracepoint(counter, pid);
        } else {
            open_hardware(counter, pid);
        }
    }
}

void counters_enable(void) {
    for (unsigned i = 0; i < counter_count; i++) {
        if (counters[i].fd >= 0) {
            ioctl(counters[i].fd, PERF_EVENT_IOC_ENABLE, 0);
        }
    }
}

void counters_read(void) {
    for (unsigned i = 0; i < counter_count; i++) {
        struct counter *counter = &counters[i];
        struct {
            uint64_t value;
            uint64_t enabled;
            uint64_t running;
        } got;
        if (counter->fd < 0) {
            continue;
        }
        if (read(counter->fd, &got, sizeof got) != (ssize_t)sizeof got) {
            REASON(counter, "reading the counter failed (%s)", error_name(errno));
        } else if (got.running == 0) {
            REASON(counter, "the kernel never found room to run this counter");
        } else {
            /* What had to share the hardware is extrapolated. */
            counter->scaled = got.running < got.enabled;
            counter->value = counter->scaled
                                 ? (int64_t)((double)got.value * (double)got.enabled / (double)got.running)
                                 : (int64_t)got.value;
        }
    }
}

int counters_open_self(const char *tracepoint) {
    long id = trace_root == NULL ? -1 : tracepoint_id(tracepoint);
    struct perf_event_attr attr = attributes(PERF_TYPE_TRACEPOINT, (uint64_t)id);
    attr.inherit = 0;
    attr.disabled = 0;
    return id < 0 ? -1 : perf_open(&attr, 0);
}
