/* Threads of the allocator's own, of which the C library knows nothing. */
#include "os/thread.h"

#include "os/cpus.h"
#include "os/file.h"
#include "os/syscall.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>

#include "check.h"
#include "deny_vectored.h"
#include "pages.h"

extern char __libc_single_threaded __attribute__((weak));

static struct {
    _Atomic(int) thread;
    _Atomic(int) argument;
    uint64_t blocked;
} seen;

static void note(void *argument) {
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, 0, (long)&seen.blocked, sizeof seen.blocked, 0, 0);
    seen.argument = *(int *)argument;
    seen.thread = (int)os_syscall(SYS_gettid, 0, 0, 0, 0, 0, 0);
    for (;;) {
        os_syscall(SYS_ppoll, 0, 0, 0, 0, 0, 0);
    }
}

static void test_thread(void) {
    static int argument = 4711;
    static struct thread thread;
    static char text[64];
    char path[64];
    uint64_t before;
    uint64_t after;
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, 0, (long)&before, sizeof before, 0, 0);
    errno = KEPT_ERRNO;
    bool was_single = &__libc_single_threaded != NULL && __libc_single_threaded;
    CHECK(thread_start(&thread, note, &argument, (size_t)64 << 10));
    CHECK_EQUAL(errno, KEPT_ERRNO);
    WAIT_UNTIL(seen.thread != 0);
    CHECK_EQUAL(seen.argument, argument);
    CHECK(seen.thread != getpid());
    /* All but the two that cannot be. */
    uint64_t never = (uint64_t)1 << (SIGKILL - 1) | (uint64_t)1 << (SIGSTOP - 1);
    CHECK_EQUAL(seen.blocked | never, UINT64_MAX);
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, 0, (long)&after, sizeof after, 0, 0);
    CHECK_EQUAL(after, before);
    snprintf(path, sizeof path, "/proc/self/task/%d/comm", seen.thread);
    CHECK(file_read(path, text, sizeof text) > 0 && strcmp(text, "calmalloc\n") == 0);
    /* To the C library there is one thread still. */
    CHECK(was_single == (&__libc_single_threaded != NULL && __libc_single_threaded));
    CHECK(kill(getpid(), SIGURG) == 0);
    int status;
    pid_t child = fork();
    if (child == 0) {
        _exit(3);
    }
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 3);
}

static struct {
    uint32_t id, free_descriptor, capabilities;
    bool own_files;
    int policy;
    struct cpu_set cpus;
} left;

static void leave_all(void *argument) {
    (void)argument;
    left.id = (uint32_t)os_syscall(SYS_gettid, 0, 0, 0, 0, 0, 0);
    left.own_files = thread_leave_files();
    left.free_descriptor = (uint32_t)os_syscall(SYS_openat, AT_FDCWD, (long)"/", O_RDONLY, 0, 0, 0);
    thread_drop_capabilities();
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct held[_LINUX_CAPABILITY_U32S_3];
    os_syscall(SYS_capget, (long)&header, (long)held, 0, 0, 0, 0);
    left.capabilities = held[0].effective | held[0].permitted | held[1].effective | held[1].permitted;
    thread_schedule_normally((const struct cpu_set *)argument);
    left.policy = (int)os_syscall(SYS_sched_getscheduler, 0, 0, 0, 0, 0, 0);
    cpu_affinity(0, &left.cpus);
}

/* All but the one by which setuid(2) reaches each thread: its sender may hold a lock that this thread is
 * about to wait for, and waits for this thread. */
static void test_block_signals(void) {
    uint64_t blocked;
    uint64_t after;
    uint64_t before = thread_block_signals();
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, 0, &blocked, sizeof blocked);
    thread_set_signals(before);
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, 0, &after, sizeof after);
    uint64_t open =
        (uint64_t)1 << (SIGKILL - 1) | (uint64_t)1 << (SIGSTOP - 1) | (uint64_t)1 << (SIGRTMIN - 2);
    CHECK_EQUAL(blocked, ~open);
    CHECK_EQUAL(after, before);
}

/* Its stack serves the next; what it leaves is still the program's. */
static void test_thread_leaves(void) {
    struct thread thread = {0};
    struct cpu_set all;
    cpu_affinity(0, &all);
    int before = dup(0);
    CHECK(before >= 0 && close(before) == 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    const struct sched_param first = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_FIFO, &first); /* where that is allowed */
    char *memory = NULL;
    for (int i = 0; i < 3; i++) {
        CHECK(thread_is_gone(&thread));
        CHECK(thread_start(&thread, leave_all, &all, (size_t)64 << 10));
        while (!thread_is_gone(&thread)) {
            thread_wait(&thread, 0);
        }
        CHECK(memory == NULL || memory == thread.memory);
        memory = thread.memory;
#ifndef __SANITIZE_ADDRESS__
        CHECK(left.own_files && left.free_descriptor == 0);
#endif
        CHECK_EQUAL(left.capabilities, 0);
        CHECK_EQUAL(left.policy, SCHED_OTHER);
        CHECK(memcmp(&left.cpus, &all, sizeof all) == 0);
    }
#ifndef __SANITIZE_ADDRESS__
    int after = dup(0);
    CHECK(after == before && close(after) == 0);
#endif
    struct cpu_set still;
    cpu_affinity(0, &still);
    CHECK(memcmp(&still, &one, sizeof one) == 0);
}

static void test_thread_refused(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    add_filter(filter, sizeof filter / sizeof filter[0]);
    struct thread thread = {0};
    size_t before = count_mappings(NULL, SIZE_MAX);
    errno = KEPT_ERRNO;
    for (int i = 0; i < 10; i++) {
        CHECK(!thread_start(&thread, note, NULL, (size_t)64 << 10));
    }
    CHECK_EQUAL(errno, KEPT_ERRNO);
    CHECK(count_mappings(NULL, SIZE_MAX) < before + 5);
}

int main(void) {
    in_child(test_thread);
    test_block_signals();
    in_child(test_thread_leaves);
    in_child(test_thread_refused);
    return 0;
}
