#include "calibrate.h"
#include "counters.h"
#include "files.h"

#include <linux/perf_event.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { BATCHES = 8, CALLS = 400, FLUSHES = 120, THREADS = 8 };

static void call_madvise(void *page) {
    (void)page;
    syscall(SYS_madvise, NULL, 0, 0);
}

static void call_getppid(void *page) {
    (void)page;
    syscall(SYS_getppid);
}

/* Gives a touched page back: one flush, of this CPU only, since the process has one thread. */
static void flush_page(void *page) {
    *(volatile char *)page = 1;
    madvise(page, (size_t)sysconf(_SC_PAGESIZE), MADV_DONTNEED);
}

/* The quickest of several batches: whatever else ran on the CPU can only have added to the others. */
static double ns_each(void (*action)(void *), void *page, unsigned count) {
    double best = 1e18;
    for (unsigned batch = 0; batch < BATCHES; batch++) {
        uint64_t start = clock_ns(CLOCK_MONOTONIC);
        for (unsigned i = 0; i < count; i++) {
            action(page);
        }
        double each = (double)(clock_ns(CLOCK_MONOTONIC) - start) / count;
        best = each < best ? each : best;
    }
    return best;
}

static double added(double with, double without) {
    return with > without ? with - without : 0.0;
}

static void calibrate_calls(struct trace_cost *cost) {
    double madvise_without = ns_each(call_madvise, NULL, CALLS);
    double getppid_without = ns_each(call_getppid, NULL, CALLS);
    int fd = counters_open_self("syscalls/sys_enter_madvise");
    if (fd >= 0) {
        cost->counted_call = added(ns_each(call_madvise, NULL, CALLS), madvise_without);
        cost->other_call = added(ns_each(call_getppid, NULL, CALLS), getppid_without);
        ioctl(fd, PERF_EVENT_IOC_DISABLE, 0);
    }
}

static void calibrate_flush(struct trace_cost *cost) {
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return;
    }
    double without = ns_each(flush_page, page, FLUSHES);
    int fd = counters_open_self("tlb/tlb_flush");
    if (fd >= 0) {
        cost->flush = added(ns_each(flush_page, page, FLUSHES), without);
        ioctl(fd, PERF_EVENT_IOC_DISABLE, 0);
    }
    munmap(page, size);
}

static void *no_work(void *unused) {
    return unused;
}

static void start_thread(void *unused) {
    pthread_t thread;
    (void)unused;
    if (pthread_create(&thread, NULL, no_work, NULL) == 0) {
        pthread_join(thread, NULL);
    }
}

static void measure(unsigned groups, struct trace_cost *cost) {
    double thread_without = ns_each(start_thread, NULL, THREADS);
    /* Flushes before calls: they are caused by a system call, which must not be traced yet. */
    if (groups & (GROUP_TLB | GROUP_RECEIVED)) {
        calibrate_flush(cost);
    }
    if (groups & GROUP_SYSCALLS) {
        calibrate_calls(cost);
    }
    counters_open(getpid(), groups);
    counters_enable();
    cost->task = added(ns_each(start_thread, NULL, THREADS), thread_without);
}

pid_t calibration_begin(unsigned groups, struct trace_cost *cost) {
    int result[2];
    *cost = (struct trace_cost){.counted_call = -1, .other_call = -1, .flush = -1, .task = -1};
    if (groups == 0 || pipe2(result, O_CLOEXEC) != 0) {
        return -1;
    }
    pid_t helper = fork();
    if (helper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        measure(groups, cost);
        if (write(result[1], cost, sizeof *cost) == (ssize_t)sizeof *cost) {
            pause(); /* with the counters open, to the kill */
        }
        _exit(1);
    }
    close(result[1]);
    struct trace_cost found;
    if (read(result[0], &found, sizeof found) == (ssize_t)sizeof found) {
        *cost = found;
    }
    close(result[0]);
    return helper;
}

void calibration_end(pid_t helper) {
    if (helper > 0) {
        kill(helper, SIGKILL);
        waitpid(helper, NULL, 0);
    }
}
