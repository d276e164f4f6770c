#include "calibrate.h"
#include "counters.h"

#include <fcntl.h>
#include <linux/perf_event.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BATCHES = 8, CALLS = 400, FLUSHES = 120, THREADS = 8 };

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

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
        uint64_t start = now_ns();
        for (unsigned i = 0; i < count; i++) {
            action(page);
        }
        double each = (double)(now_ns() - start) / count;
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
    int fd = counters_open_self("syscalls/sys_enter_madvise", NULL);
    if (fd < 0) {
        return;
    }
    ioctl(fd, PERF_EVENT_IOC_ENABLE, 0);
    cost->counted_call = added(ns_each(call_madvise, NULL, CALLS), madvise_without);
    cost->other_call = added(ns_each(call_getppid, NULL, CALLS), getppid_without);
    ioctl(fd, PERF_EVENT_IOC_DISABLE, 0);
}

static void calibrate_flush(struct trace_cost *cost) {
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return;
    }
    double without = ns_each(flush_page, page, FLUSHES);
    int fd = counters_open_self("tlb/tlb_flush", NULL);
    if (fd >= 0) {
        ioctl(fd, PERF_EVENT_IOC_ENABLE, 0);
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

static struct trace_cost measure(unsigned groups) {
    struct trace_cost cost = {.counted_call = -1, .other_call = -1, .flush = -1, .task = -1};
    double thread_without = ns_each(start_thread, NULL, THREADS);
    /* Flushes before calls: they are caused by a system call, which must not be traced yet. */
    if (groups & (GROUP_TLB | GROUP_RECEIVED)) {
        calibrate_flush(&cost);
    }
    if (groups & GROUP_SYSCALLS) {
        calibrate_calls(&cost);
    }
    counters_open(getpid(), groups);
    counters_enable();
    cost.task = added(ns_each(start_thread, NULL, THREADS), thread_without);
    return cost;
}

static _Noreturn void be_the_helper(unsigned groups, int result) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct trace_cost cost = measure(groups);
    if (write(result, &cost, sizeof cost) == (ssize_t)sizeof cost) {
        pause(); /* with the counters open, to the kill */
    }
    _exit(1);
}

struct calibration calibration_begin(unsigned groups) {
    struct calibration calibration = {
        .cost = {.counted_call = -1, .other_call = -1, .flush = -1, .task = -1},
        .helper = -1,
    };
    int result[2];
    if (groups == 0 || pipe2(result, O_CLOEXEC) != 0) {
        return calibration;
    }
    calibration.helper = fork();
    if (calibration.helper == 0) {
        be_the_helper(groups, result[1]);
    }
    close(result[1]);
    struct trace_cost cost;
    if (calibration.helper > 0 && read(result[0], &cost, sizeof cost) == (ssize_t)sizeof cost) {
        calibration.cost = cost;
    }
    close(result[0]);
    return calibration;
}

void calibration_end(const struct calibration *calibration) {
    if (calibration->helper > 0) {
        kill(calibration->helper, SIGKILL);
        waitpid(calibration->helper, NULL, 0);
    }
}
