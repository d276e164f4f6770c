/* Forks of a program that does not know the allocator: forks CASE [ARGUMENT]. */
#include "api.h"
#include "names.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>

/* What goes past all caches, to the heap and under its lock: a block of every kind, and a purge now and then.
 */
static void use_heap(uint64_t round) {
    static const size_t sizes[] = {40, 3000, 40 * KIB, 300 * KIB};
    void *blocks[64];
    for (size_t i = 0; i < 64; i++) {
        blocks[i] = malloc(sizes[(round + i) % 4]);
        CHECK(blocks[i] != NULL);
        *(volatile char *)blocks[i] = 1;
    }
    for (size_t i = 0; i < 64; i++) {
        free(blocks[i]);
    }
    if (governed() && round % 16 == 0) {
        calm_trim(0);
    }
}

static atomic_bool stop;

/* ---- handlers that are registered before any constructor runs, even the allocator's ---- */

enum { HANDLERS_NONE, HANDLERS_ALLOCATE, HANDLERS_LOCK, HANDLERS_FORK };

static _Atomic(int) handlers_do;
static _Atomic(uint64_t) handled;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* As a signal handler might. */
static void fork_within(void) {
    handlers_do = HANDLERS_ALLOCATE;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        use_heap(0);
        _exit(0);
    }
    check_child(child);
    handlers_do = HANDLERS_FORK;
}

static void before_fork(void) {
    if (handlers_do == HANDLERS_LOCK) {
        CHECK(pthread_mutex_lock(&mutex) == 0);
    }
    if (handlers_do != HANDLERS_NONE) {
        use_heap(atomic_fetch_add(&handled, 1));
    }
    if (handlers_do == HANDLERS_FORK) {
        fork_within();
    }
}

static void after_fork(void) {
    if (handlers_do != HANDLERS_NONE) {
        use_heap(atomic_fetch_add(&handled, 1));
    }
    if (handlers_do == HANDLERS_LOCK) {
        CHECK(pthread_mutex_unlock(&mutex) == 0);
    }
}

static void register_handlers(void) {
    CHECK(pthread_atfork(before_fork, after_fork, after_fork) == 0);
}

__attribute__((section(".preinit_array"), used)) static void (*const first)(void) = register_handlers;

static void use_until_stopped(size_t thread) {
    for (uint64_t round = thread; !atomic_load(&stop); round++) {
        if (handlers_do == HANDLERS_LOCK) {
            CHECK(pthread_mutex_lock(&mutex) == 0);
        }
        use_heap(round);
        if (handlers_do == HANDLERS_LOCK) {
            CHECK(pthread_mutex_unlock(&mutex) == 0);
        }
    }
}

static void fork_and_use(size_t forks) {
    for (size_t i = 0; i < forks; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            for (uint64_t round = 0; round < 4; round++) {
                use_heap(round);
            }
            _exit(0);
        }
        check_child(child);
    }
}

static size_t forks_wanted;

static void fork_or_use(size_t thread) {
    if (thread == 0) {
        fork_and_use(forks_wanted);
        atomic_store(&stop, true);
    } else {
        use_until_stopped(thread);
    }
}

static void fork_with_handlers(int handlers, const char *argument) {
    handlers_do = handlers;
    forks_wanted = number_or(argument, 50);
    fork_and_use(2); /* with one thread */
    run_threads(3, fork_or_use);
    say("handled", atomic_load(&handled));
}

static void handlers(const char *argument) {
    fork_with_handlers(HANDLERS_ALLOCATE, argument);
}

/* One fork within another. */
static void handlers_fork(const char *argument) {
    fork_with_handlers(HANDLERS_FORK, argument);
}

/* A lock that a thread holds while it allocates. */
static void handlers_lock(const char *argument) {
    fork_with_handlers(HANDLERS_LOCK, argument);
}

/* ---- files: fork waits for the list of them, whose holder waits for a file, whose owner allocates ---- */

static FILE *files[2];

static void use_file(size_t thread) {
    FILE *file = files[thread % 2];
    for (uint64_t round = 0; !atomic_load(&stop); round++) {
        flockfile(file);
        use_heap(round);
        fputc('.', file);
        funlockfile(file);
    }
}

static void fork_or_use_files(size_t thread) {
    if (thread == 0) {
        fork_and_use(forks_wanted);
        atomic_store(&stop, true);
    } else if (thread == 1) {
        while (!atomic_load(&stop)) {
            CHECK(fflush(NULL) == 0);
            sched_yield(); /* or the forking thread seldom gets the list */
        }
    } else {
        use_file(thread);
    }
}

static void stdio(const char *argument) {
    forks_wanted = number_or(argument, 150);
    for (size_t i = 0; i < 2; i++) {
        files[i] = fopen("/dev/null", "w");
        CHECK(files[i] != NULL);
    }
    run_threads(5, fork_or_use_files);
    /* The list is as it was: neither held nor lost. */
    CHECK(fflush(NULL) == 0 && fclose(files[0]) == 0 && fclose(files[1]) == 0);
    say("forks", forks_wanted);
}

/* ---- signals: a handler that interrupted the allocator forks ---- */

static volatile sig_atomic_t forked, failed, is_child;

/* Every other child goes back to what was interrupted. */
static void fork_in_handler(int signal) {
    (void)signal;
    pid_t child = fork();
    if (child == 0 && forked % 2 == 0) {
        _exit(0);
    }
    if (child == 0) {
        is_child = 1;
        return;
    }
    int status;
    failed |= child < 0 || waitpid(child, &status, 0) != child || status != 0;
    forked++;
}

/* Once the last one is handled: at any moment of what follows. */
static void interrupt_again(uint64_t round) {
    struct itimerval soon = {.it_value = {0, 1 + (suseconds_t)(round % 300)}};
    CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
}

static void signals(const char *argument) {
    size_t forks = number_or(argument, 400);
    struct sigaction action = {.sa_handler = fork_in_handler, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    for (uint64_t round = 0; (size_t)forked < forks; round++) {
        sig_atomic_t before = forked;
        interrupt_again(round);
        while (forked == before) {
            use_heap(round);
            if (is_child) {
                use_heap(round + 1);
                _exit(0);
            }
        }
    }
    CHECK(!failed);
    say("forks", (uint64_t)forked);
}

static void block_alarms(int how) {
    sigset_t alarms;
    sigemptyset(&alarms);
    sigaddset(&alarms, SIGALRM);
    CHECK(pthread_sigmask(how, &alarms, NULL) == 0);
}

static void signals_beside(size_t thread) {
    if (thread == 0) {
        block_alarms(SIG_UNBLOCK);
        signals("200");
        atomic_store(&stop, true);
    } else {
        use_until_stopped(thread);
    }
}

static void signals_and_threads(const char *argument) {
    (void)argument;
    block_alarms(SIG_BLOCK); /* or the main thread, which only waits, would have them */
    run_threads(3, signals_beside);
}

/* ---- copies of the process that call no handlers ---- */

pid_t _Fork(void) __attribute__((weak)); /* from glibc 2.34 on */

static int use_heap_in_copy(void *round) {
    for (uint64_t i = 0; i < 8; i++) {
        use_heap((uint64_t)(uintptr_t)round + i);
    }
    _exit(0);
}

static pid_t copy_by_number(uint64_t round) {
    uint64_t arguments[8] = {[4] = SIGCHLD}; /* as of Linux 5.3: flags first, the stack sixth */
    long pid = round % 2 == 0 ? syscall(SYS_clone3, arguments, sizeof arguments) : -1;
    return (pid_t)(pid >= 0 ? pid : syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
}

static pid_t copy(uint64_t round) {
    static _Alignas(64) char stack[1 << 20];
    void *argument = (void *)(uintptr_t)round;
    if (round % 3 == 0) {
        return clone(use_heap_in_copy, stack + sizeof stack, SIGCHLD, argument);
    }
    pid_t pid = round % 3 == 1 && _Fork != NULL ? _Fork() : copy_by_number(round);
    if (pid == 0) {
        use_heap_in_copy(argument);
    }
    return pid;
}

/* A program of one thread may do so, and keeps so much that there is a thread of the allocator's, too: which
 * is at its work time and again, and holds locks then. */
static void copies(const char *argument) {
    (void)argument;
    enum { BLOCKS = 64 };
    void *blocks[BLOCKS];
    uint64_t beside = 0;
    for (uint64_t round = 0; round < 90; round++) {
        for (size_t i = 0; i < BLOCKS; i++) {
            blocks[i] = malloc(256 * KIB);
            CHECK(blocks[i] != NULL);
            memset(blocks[i], 1, 256 * KIB);
        }
        for (size_t i = 0; i < BLOCKS; i++) {
            free(blocks[i]);
        }
        beside += number_of_threads() > 1;
        pid_t pid = copy(round);
        CHECK(pid > 0);
        check_child(pid);
        if (round % 10 == 9) {
            sleep_seconds(0.3); /* and it is about to give back */
        }
    }
    say("beside", beside);
}

/* ---- what a fork costs ---- */

static uint64_t minor_faults(int who) {
    struct rusage usage;
    CHECK(getrusage(who, &usage) == 0);
    return (uint64_t)usage.ru_minflt;
}

static void cost(const char *argument) {
    (void)argument;
    use_heap(0);
    enum { FORKS = 20 };
    uint64_t parent = 0, child = minor_faults(RUSAGE_CHILDREN);
    for (size_t i = 0; i < FORKS; i++) {
        uint64_t before = minor_faults(RUSAGE_SELF);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            _exit(0);
        }
        parent += minor_faults(RUSAGE_SELF) - before;
        check_child(pid);
    }
    say("parent_faults", parent / FORKS);
    say("child_faults", (minor_faults(RUSAGE_CHILDREN) - child) / FORKS);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"handlers", handlers},
        {"handlers-fork", handlers_fork},
        {"handlers-lock", handlers_lock},
        {"stdio", stdio},
        {"signals", signals},
        {"signals-and-threads", signals_and_threads},
        {"copies", copies},
        {"cost", cost},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
