/*
 * Children that share their parent's memory, and threads without restartable sequences: children CASE
 * [ARGUMENT].
 */
#include "api.h"
#include "names.h"

#include <errno.h>
#include <linux/sched.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <threads.h>

static atomic_bool children_end;

/* Blocks of a few classes, of which each holds what only its thread wrote. */
static void mark_blocks(uint64_t mark, size_t rounds) {
    enum { BLOCKS = 60 };
    void *held[BLOCKS];
    for (size_t round = 0; round < rounds; round++) {
        for (size_t i = 0; i < BLOCKS; i++) {
            held[i] = malloc(32 + i % 3 * 32);
            CHECK(held[i] != NULL);
            fill(held[i], 32, mark + i);
        }
        for (size_t i = 0; i < BLOCKS; i++) {
            CHECK(is_filled(held[i], 32, mark + i));
            free(held[i]);
        }
    }
}

static void mark_in_handler(int unused) {
    (void)unused;
    mark_blocks(3, 1);
}

/* Its own work is what such a child may do, and more: it allocates while threads of its parent's do. */
static int live_on_shared_memory(void *unused) {
    (void)unused;
    mark_blocks(1, 20);
    CHECK(kill(getpid(), SIGUSR1) == 0);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    mark_blocks(4, 1);
    return 0;
}

static pid_t by_vfork(void) {
    pid_t child = vfork();
    if (child == 0) {
        live_on_shared_memory(NULL);
        _exit(0);
    }
    return child;
}

/* A child's child; both share the memory. */
static pid_t by_vfork_twice(void) {
    pid_t child = vfork();
    if (child == 0) {
        mark_blocks(5, 5);
        check_child(by_vfork());
        mark_blocks(6, 5);
        _exit(0);
    }
    return child;
}

static char *stack_end(void) {
    enum { STACK = 256 << 10 };
    static char *stack;
    stack = stack != NULL ? stack : own_pages(STACK);
    return stack + STACK;
}

static pid_t by_clone(void) {
    return clone(live_on_shared_memory, stack_end(), CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
}

/* The parent's thread goes on, though not in malloc, which glibc's does not expect: it waits for the child.
 */
static pid_t by_clone_without_vfork(void) {
    return clone(live_on_shared_memory, stack_end(), CLONE_VM | SIGCHLD, NULL);
}

static int be_killed(void *unused) {
    live_on_shared_memory(unused);
    return kill(getpid(), SIGKILL);
}

static pid_t by_clone_and_killed(void) {
    return clone(be_killed, stack_end(), CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
}

/* The child returns from syscall on its parent's stack, as from vfork, and overwrites what is below. */
__attribute__((noinline)) static pid_t live_if_child(long child) {
    if (child == 0) {
        live_on_shared_memory(NULL);
        _exit(0);
    }
    return (pid_t)child;
}

static pid_t by_syscall_clone(void) {
    return live_if_child(syscall(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, 0, 0, 0, 0));
}

static pid_t by_syscall_clone3(void) {
    struct clone_args arguments = {.flags = CLONE_VM | CLONE_VFORK, .exit_signal = SIGCHLD};
    return live_if_child(syscall(SYS_clone3, &arguments, sizeof arguments));
}

#ifdef __x86_64__
static void live_and_exit(void) {
    live_on_shared_memory(NULL);
    _exit(0);
}

/* On another stack the child returns from syscall to the address that it finds there. */
static pid_t by_syscall_to_stack(void) {
    uintptr_t *top = (uintptr_t *)(void *)stack_end() - 2;
    top[0] = (uintptr_t)live_and_exit;
    return (pid_t)syscall(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, top, 0, 0, 0);
}
#endif

#ifdef SYS_vfork
static pid_t by_syscall_vfork(void) {
    return live_if_child(syscall(SYS_vfork));
}
#endif

static const struct way {
    const char *name;
    pid_t (*make_child)(void);
} ways[] = {
    {"vfork", by_vfork},
    {"vfork-twice", by_vfork_twice},
    {"clone", by_clone},
    {"clone-without-vfork", by_clone_without_vfork},
    {"clone-killed", by_clone_and_killed},
    {"syscall-clone", by_syscall_clone},
    {"syscall-clone3", by_syscall_clone3},
#ifdef __x86_64__
    {"syscall-to-stack", by_syscall_to_stack},
#endif
#ifdef SYS_vfork
    {"syscall-vfork", by_syscall_vfork},
#endif
};

#ifdef __GLIBC__

#define RSEQ_AREA_BYTES 32
#define RSEQ_UNREGISTER 1
#ifdef __x86_64__
#define RSEQ_SIGNATURE 0x53053053
#else
#define RSEQ_SIGNATURE 0xd428bc00
#endif

extern const ptrdiff_t __rseq_offset __attribute__((weak));
extern const unsigned __rseq_size __attribute__((weak));

/* gcc before 11 has no __builtin_thread_pointer for x86-64. */
static char *thread_pointer(void) {
    char *pointer;
#if defined(__x86_64__)
    __asm__("mov %%fs:0, %0" : "=r"(pointer));
#else
    __asm__("mrs %0, tpidr_el0" : "=r"(pointer));
#endif
    return pointer;
}

/* Whether the kernel keeps a CPU's number for the caller in the C library's area. */
static bool is_registered(void) {
    if (&__rseq_offset == NULL) {
        return false;
    }
    const char *area = thread_pointer() + __rseq_offset;
    return (int)*(const volatile uint32_t *)(const void *)(area + 4) >= 0;
}

static bool have_rseq(void) {
    return &__rseq_size != NULL && __rseq_size != 0 && is_registered();
}

static long call_rseq(void *area, int flags) {
    unsigned bytes = __rseq_size > RSEQ_AREA_BYTES ? __rseq_size : RSEQ_AREA_BYTES;
    return syscall(SYS_rseq, area, bytes, flags, RSEQ_SIGNATURE);
}

/* Before Linux 6.3 malloc's number of no CPU stands where that of the CPU does: one cannot tell. */
static bool tells_registration(void) {
    enum { FEATURE_SIZE = 27, WITH_OTHER_NUMBER = 28 };
    return getauxval(FEATURE_SIZE) >= WITH_OTHER_NUMBER;
}

/* As libraries do that bring an area of their own, and their threads, which may end so. */
static void *live_unregistered(void *unused) {
    static const size_t ROUNDS = 200;
    if (!have_rseq()) {
        return unused;
    }
    void *area = thread_pointer() + __rseq_offset;
    CHECK(call_rseq(area, RSEQ_UNREGISTER) == 0);
    CHECK(!tells_registration() || !is_registered());
    mark_blocks(7, ROUNDS);
    CHECK(call_rseq(area, RSEQ_UNREGISTER) == -1 && errno == EINVAL);
    check_child(by_vfork());
    check_child(by_clone());
    CHECK(!tells_registration() || !is_registered());
#ifdef STATIC
    /* Whose child may start no threads: there is no wrapper of pthread_create. */
    pid_t child = fork();
    if (child == 0) {
        mark_blocks(14, ROUNDS);
        _exit(0);
    }
    check_child(child);
#else
    fork_once(1);
#endif
    void *own = own_pages(4096);
    CHECK(call_rseq(own, 0) == 0);
    mark_blocks(8, ROUNDS);
    CHECK(call_rseq(own, RSEQ_UNREGISTER) == 0);
    mark_blocks(9, ROUNDS);
    CHECK(call_rseq(area, 0) == 0 && is_registered());
    mark_blocks(10, ROUNDS);
    CHECK(call_rseq(area, RSEQ_UNREGISTER) == 0);
    return unused;
}

static void *live_as_heir_of_none(void *mark) {
    mark_blocks((uintptr_t)mark, 100);
    return NULL;
}

static int live_as_heir_of_none_c11(void *mark) {
    live_as_heir_of_none(mark);
    return 0;
}

/* Threads of a creator that has no registration: the C library registers none for them either. */
static void *create_unregistered(void *unused) {
    if (!have_rseq()) {
        return unused;
    }
    CHECK(call_rseq(thread_pointer() + __rseq_offset, RSEQ_UNREGISTER) == 0);
    for (uintptr_t round = 0; round < 20; round++) {
        pthread_t thread;
        thrd_t thread_c11;
        CHECK(pthread_create(&thread, NULL, live_as_heir_of_none, (void *)(round + 11)) == 0);
        CHECK(thrd_create(&thread_c11, live_as_heir_of_none_c11, (void *)(round + 99)) == thrd_success);
        mark_blocks(12, 100);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(thrd_join(thread_c11, NULL) == thrd_success);
    }
    return unused;
}

static void create_in_unregistered_thread(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, create_unregistered, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static void live_unregistered_in_threads(void) {
    for (int i = 0; i < 10; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, live_unregistered, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    live_unregistered(NULL);
}

#else

static bool have_rseq(void) {
    return false;
}

static bool is_registered(void) {
    return false;
}

static bool tells_registration(void) {
    return false;
}

static void live_unregistered_in_threads(void) {
}

static void create_in_unregistered_thread(void) {
}

#endif

/*
 * The kernel may kill a process that changes the numbers of a registered area. So a child that finds the
 * number of no CPU must find an area without a registration. Before Linux 6.3 the number that malloc reads is
 * that by which one tells.
 */
static void child_has_no_number(const char *unused) {
    (void)unused;
    if (!have_rseq() || !tells_registration()) {
        return;
    }
    pid_t child = vfork();
    if (child == 0) {
        _exit(is_registered());
    }
    check_child(child);
    CHECK(is_registered());
}

static const struct way *child_way;

/* Of a creator that made children, and for one of them gave up its own registration. */
static void *check_registration(void *registered) {
    CHECK(is_registered() == (registered != NULL));
    mark_blocks(13, 100);
    return NULL;
}

static void make_children(void) {
    bool registered = have_rseq();
    bool killed = child_way->make_child == by_clone_and_killed;
    bool resumes = child_way->make_child != by_clone_without_vfork;
    for (size_t i = 0; i < 200; i++) {
        pid_t child = child_way->make_child();
        CHECK(child > 0);
        if (killed) {
            int status;
            CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        } else {
            check_child(child);
        }
        CHECK(!resumes || is_registered() == registered);
        mark_blocks(2, 2);
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, check_registration, registered ? &children_end : NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static void (*body_of_first)(void);

static void run_first_or_work(size_t thread) {
    for (uint64_t mark = thread << 32; thread != 0 && !atomic_load(&children_end); mark += 1000) {
        mark_blocks(mark, 10);
    }
    if (thread == 0) {
        body_of_first();
        atomic_store(&children_end, true);
    }
}

static void children(const char *argument) {
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        child_way = strcmp(argument, ways[i].name) == 0 ? &ways[i] : child_way;
    }
    CHECK(child_way != NULL);
    struct sigaction action = {.sa_handler = mark_in_handler};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    body_of_first = make_children;
    run_threads(4, run_first_or_work);
#ifdef SYS_vfork
    deny_call(SYS_vfork, EAGAIN);
    errno = 0;
    CHECK(vfork() == -1 && errno == EAGAIN);
#endif
    deny_call(SYS_clone, EAGAIN);
    errno = 0;
    CHECK(by_clone() == -1 && errno == EAGAIN);
    errno = 0;
    CHECK(by_clone_without_vfork() == -1 && errno == EAGAIN);
    errno = 0;
    CHECK(by_syscall_clone() == -1 && errno == EAGAIN);
    mark_blocks(2, 2);
}

static void unregistered(const char *unused) {
    (void)unused;
    struct sigaction action = {.sa_handler = mark_in_handler};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    body_of_first = live_unregistered_in_threads;
    run_threads(4, run_first_or_work);
}

static void unregistered_creator(const char *unused) {
    (void)unused;
    body_of_first = create_in_unregistered_thread;
    run_threads(4, run_first_or_work);
}

/* A program registers an area of its own where the C library has none: malloc's yields to it. */
static void *register_own(void *unused) {
    enum { AREA_BYTES = 32, ROUNDS = 200 };
#ifdef __x86_64__
    static const unsigned SIGNATURE = 0x53053053;
#else
    static const unsigned SIGNATURE = 0xd428bc00;
#endif
    mark_blocks(15, ROUNDS);
    void *area = aligned_alloc(AREA_BYTES, AREA_BYTES);
    memset(area, 0, AREA_BYTES);
    for (int round = 0; round < 3; round++) {
        long result = syscall(SYS_rseq, area, AREA_BYTES, 0, SIGNATURE);
        CHECK(result == 0 || errno == EINVAL || errno == ENOSYS);
        mark_blocks(16, ROUNDS);
        if (result == 0) {
            check_child(by_vfork());
            CHECK(syscall(SYS_rseq, area, AREA_BYTES, 1, SIGNATURE) == 0);
        }
        printf("%s\n", result == 0 ? "registered" : "refused");
        mark_blocks(17, ROUNDS);
    }
    free(area);
    return unused;
}

static void register_own_in_threads(void) {
    for (int i = 0; i < 10; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, register_own, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    register_own(NULL);
}

static void own_area(const char *unused) {
    (void)unused;
    struct sigaction action = {.sa_handler = mark_in_handler};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    body_of_first = register_own_in_threads;
    run_threads(4, run_first_or_work);
}

static atomic_size_t detached_ended;

static void *live_detached(void *unused) {
    mark_blocks(18, 1);
    atomic_fetch_add(&detached_ended, 1);
    return unused;
}

/* Some C libraries unmap the stack and the thread-local storage of such threads while these still run. */
static void detach_threads(void) {
    enum { THREADS = 20000, AT_ONCE = 20 };
    pthread_attr_t detached;
    CHECK(pthread_attr_init(&detached) == 0);
    CHECK(pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED) == 0);
    for (size_t started = 0; started < THREADS; started++) {
        while (started - atomic_load(&detached_ended) > AT_ONCE) {
            sched_yield();
        }
        pthread_t thread;
        CHECK(pthread_create(&thread, &detached, live_detached, NULL) == 0);
    }
    while (atomic_load(&detached_ended) < THREADS) {
        sched_yield();
    }
}

static void detached(const char *unused) {
    (void)unused;
    body_of_first = detach_threads;
    run_threads(4, run_first_or_work);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"own-area", own_area},         {"detached", detached},
        {"children", children},         {"child-has-no-number", child_has_no_number},
        {"unregistered", unregistered}, {"unregistered-creator", unregistered_creator},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
