/* Forks, children, and threads that start and end in every way: processes CASE [ARGUMENT]. */
#include "api.h"
#include "names.h"

#include <errno.h>
#include <grp.h>
#include <linux/sched.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <threads.h>

extern char **environ;

static size_t number(const char *argument, size_t otherwise) {
    return *argument == '\0' ? otherwise : strtoul(argument, NULL, 10);
}

/* ---- forks ---- */

static atomic_bool stop;

static void work_in_thread(size_t thread) {
    use_blocks(thread + 99, 300);
}

static void live_as_child(size_t i) {
    use_blocks(i, 300);
    run_threads(1 + i % 2, work_in_thread);
    if (governed()) {
        stats_now();
        if (i % 3 == 0) {
            calm_trim(0);
        }
    }
}

static void fork_once(size_t i) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        live_as_child(i);
        if (i % 8 == 0) {
            exit(0);
        }
        _exit(0);
    }
    check_child(child);
}

static void work_until_stopped(size_t thread) {
    for (uint64_t round = 0; !atomic_load(&stop); round++) {
        use_blocks(thread * 1000 + round, 200);
    }
}

static size_t forks_wanted;

static void fork_or_work(size_t thread) {
    if (thread == 0) {
        for (size_t i = 0; i < forks_wanted; i++) {
            fork_once(i);
        }
        atomic_store(&stop, true);
    } else {
        work_until_stopped(thread);
    }
}

/* While others allocate. */
static void fork_storm(const char *argument) {
    forks_wanted = number(argument, 40);
    run_threads(4, fork_or_work);
    fork_once(1);
}

/* From several threads at once. */
static void fork_from_threads(size_t thread) {
    for (size_t i = 0; i < forks_wanted; i++) {
        use_blocks(i, 50);
        fork_once(thread + i);
    }
}

static void forks_at_once(const char *argument) {
    forks_wanted = number(argument, 15);
    run_threads(4, fork_from_threads);
}

/* Children of children. */
static void fork_deep(const char *unused) {
    (void)unused;
    for (int depth = 0; depth < 20; depth++) {
        use_blocks((uint64_t)depth, 200);
        run_threads(2, work_in_thread);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child != 0) {
            check_child(child);
            if (depth > 0) {
                _exit(0);
            }
            return;
        }
    }
    _exit(0);
}

enum { INHERITED = 4000 };

static void *inherited[INHERITED];

static void allocate_inherited(size_t thread) {
    for (size_t i = thread; i < INHERITED; i += 4) {
        size_t bytes = 1 + i * 13 % 9000;
        inherited[i] = malloc(bytes);
        CHECK(inherited[i] != NULL);
        fill(inherited[i], bytes, i);
    }
}

/* The blocks of the parent's threads, which the child does not have. The parent's stay as they are. */
static void child_frees(const char *unused) {
    (void)unused;
    run_threads(4, allocate_inherited);
    for (int round = 0; round < 5; round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        for (size_t i = 0; i < INHERITED; i++) {
            size_t bytes = 1 + i * 13 % 9000;
            CHECK(is_filled(inherited[i], bytes, i));
            if (child == 0) {
                inherited[i] = i % 3 == 0 ? realloc(inherited[i], bytes + 3000) : inherited[i];
                CHECK(inherited[i] != NULL && is_filled(inherited[i], bytes / 8 * 8, i));
                free(inherited[i]);
            }
        }
        if (child == 0) {
            run_threads(2, work_in_thread);
            _exit(0);
        }
        check_child(child);
    }
    for (size_t i = 0; i < INHERITED; i++) {
        free(inherited[i]);
    }
}

/* Blocks go from thread to thread through these places; each says how long it is. */
enum { PLACES = 256 };

static _Atomic(size_t *) places[PLACES];

static size_t *new_letter(uint64_t *random) {
    uint64_t dice = next_random(random);
    size_t bytes = 32 + (dice >> 8) % (dice % 50 == 0 ? 200 * KIB : 3000);
    size_t *letter = malloc(bytes);
    CHECK(letter != NULL);
    *letter = bytes;
    fill(letter + 1, bytes - sizeof *letter, bytes);
    return letter;
}

static void free_letter(size_t *letter) {
    if (letter != NULL) {
        CHECK(is_filled(letter + 1, *letter - sizeof *letter, *letter));
        free(letter);
    }
}

static void exchange_letters(uint64_t *random, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t at = next_random(random) % PLACES;
        free_letter(atomic_exchange(&places[at], new_letter(random)));
    }
}

static void free_all_letters(void) {
    for (size_t i = 0; i < PLACES; i++) {
        free_letter(atomic_exchange(&places[i], NULL));
    }
}

static void *exchange_some(void *unused) {
    uint64_t random = 7;
    exchange_letters(&random, 300);
    return unused;
}

/* Frees what others than this process's threads allocated; forks while its own first threads start. */
static void live_as_heir(size_t depth) {
    if (depth % 2 == 0) {
        free_all_letters();
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, exchange_some, NULL) == 0);
    if (depth < 2) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            live_as_heir(depth + 1);
            _exit(0);
        }
        check_child(child);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    free_all_letters();
    use_blocks(depth, 100);
}

static void fork_or_exchange(size_t thread) {
    uint64_t random = thread + 1;
    while (thread > 0 && !atomic_load(&stop)) {
        exchange_letters(&random, 100);
    }
    for (size_t i = 0; thread == 0 && i < forks_wanted; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            live_as_heir(i % 3);
            _exit(0);
        }
        check_child(child);
    }
    atomic_store(&stop, true);
}

/* While blocks are on their way from those that allocated them to those that free them. */
static void fork_in_flight(const char *argument) {
    forks_wanted = number(argument, 25);
    run_threads(4, fork_or_exchange);
    free_all_letters();
}

/* Handlers of the program's own, which allocate, at every stage of a fork. */
static void allocate_a_little(void) {
    void *block = malloc(3000);
    CHECK(block != NULL);
    fill(block, 3000, 1);
    free(block);
}

static void fork_handlers(const char *argument) {
    CHECK(pthread_atfork(allocate_a_little, allocate_a_little, allocate_a_little) == 0);
    forks_wanted = number(argument, 40);
    run_threads(3, fork_or_work);
}

/*
 * A server that forks its workers: what each of them has to itself, at rest after work, and how much of that
 * is neither retained nor cached by the allocator's own account.
 */
static void prefork(const char *argument) {
    size_t children = number(argument, 12);
    struct cost {
        size_t dirty, above;
    } *costs =
        mmap(NULL, children * sizeof *costs, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK((void *)costs != MAP_FAILED);
    size_t count = 64 * MIB / 4000;
    void **held = own_pages(count * sizeof *held);
    for (size_t i = 0; i < count; i++) {
        held[i] = malloc(4000);
        CHECK(held[i] != NULL);
        fill(held[i], 4000, i);
    }
    run_threads(2, work_in_thread);
    pid_t pids[64];
    CHECK(children <= 64);
    for (size_t i = 0; i < children; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] == 0) {
            for (size_t round = 0; round < 5; round++) {
                enum { BURST = 200 };
                void *burst[BURST];
                for (size_t j = 0; j < BURST; j++) {
                    burst[j] = malloc(100 * KIB);
                    CHECK(burst[j] != NULL);
                    memset(burst[j], 1, 100 * KIB);
                }
                use_blocks(i * 5 + round, 500);
                for (size_t j = 0; j < BURST; j++) {
                    free(burst[j]);
                }
            }
            /* Its parent's blocks are still what they were. */
            for (size_t j = 0; j < count; j += 97) {
                CHECK(is_filled(held[j], 4000, j));
            }
            struct calm_stats stats = {0};
            if (governed()) {
                stats = stats_now(); /* a server, if there is one, has seen all that was freed, then */
            }
            costs[i].dirty = costs[i].above = rollup_bytes("Private_Dirty");
            if (governed()) {
                CHECK(stats.retained <= stats.retained_limit && stats.cached <= stats.cached_limit);
                size_t known = stats.retained + stats.cached;
                costs[i].above -= known < costs[i].dirty ? known : costs[i].dirty;
            }
            _exit(0);
        }
    }
    struct cost most = {0};
    for (size_t i = 0; i < children; i++) {
        check_child(pids[i]);
        most.dirty = costs[i].dirty > most.dirty ? costs[i].dirty : most.dirty;
        most.above = costs[i].above > most.above ? costs[i].above : most.above;
    }
    say("max_dirty", most.dirty);
    say("max_above", most.above);
    for (size_t i = 0; i < count; i++) {
        CHECK(is_filled(held[i], 4000, i));
        free(held[i]);
    }
}

/* ---- children that share their parent's memory, and threads without restartable sequences ---- */

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

#ifdef __x86_64__

#define RSEQ_AREA_BYTES 32
#define RSEQ_SIGNATURE  0x53053053
#define RSEQ_UNREGISTER 1

extern const ptrdiff_t __rseq_offset __attribute__((weak));
extern const unsigned __rseq_size __attribute__((weak));

/* Whether the kernel keeps a CPU's number for the caller in the C library's area. */
static bool is_registered(void) {
    const char *area = (const char *)__builtin_thread_pointer() + __rseq_offset;
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
    void *area = (char *)__builtin_thread_pointer() + __rseq_offset;
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
    CHECK(call_rseq((char *)__builtin_thread_pointer() + __rseq_offset, RSEQ_UNREGISTER) == 0);
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

/* ---- other programs ---- */

static void spawn_once(size_t i) {
    char *const arguments[] = {"true", NULL};
    pid_t child = 0;
    if (i % 2 == 0) {
        CHECK(posix_spawnp(&child, "true", NULL, NULL, arguments, environ) == 0);
    } else {
        child = vfork();
        CHECK(child >= 0);
        if (child == 0) {
            execvp("true", arguments);
            _exit(99);
        }
    }
    check_child(child);
}

static void spawn_or_work(size_t thread) {
    if (thread == 0) {
        for (size_t i = 0; i < 60; i++) {
            spawn_once(i);
        }
        CHECK(system("exit 0") == 0);
        char text[32] = "";
        FILE *stream = popen("echo said", "r");
        CHECK(stream != NULL && fgets(text, sizeof text, stream) != NULL && pclose(stream) == 0);
        CHECK(strcmp(text, "said\n") == 0);
        atomic_store(&stop, true);
    } else {
        work_until_stopped(thread);
    }
}

static void spawn_others(const char *unused) {
    (void)unused;
    run_threads(3, spawn_or_work);
}

/* As a server does once it has its sockets: from root to nobody, with threads at work. */
static void give_up_root(size_t thread) {
    if (thread > 0) {
        work_until_stopped(thread);
        return;
    }
    enum { NOBODY = 65534 };
    sleep_seconds(0.02);
    CHECK(setgroups(0, NULL) == 0 && setresgid(NOBODY, NOBODY, NOBODY) == 0);
    CHECK(setresuid(NOBODY, NOBODY, NOBODY) == 0 && geteuid() == NOBODY && setuid(0) != 0);
    use_blocks(1, 2000);
    for (size_t i = 0; i < 5; i++) {
        fork_once(i);
    }
    atomic_store(&stop, true);
}

static void become_nobody(const char *unused) {
    (void)unused;
    if (geteuid() != 0) {
        fprintf(stderr, "only root can become somebody else\n");
        _Exit(CANNOT);
    }
    run_threads(3, give_up_root);
    use_blocks(2, 1000);
}

/* ---- threads ---- */

enum { LEFT = 128 };

static _Atomic(void *) left[LEFT];

/* Leaves its blocks to others, and frees theirs. */
static void live_briefly(size_t thread) {
    uint64_t random = thread * 31 + 1;
    for (int i = 0; i < 12; i++) {
        size_t bytes = 100 + next_random(&random) % (i == 0 ? 100 * KIB : 4 * KIB);
        void *mine = malloc(bytes);
        CHECK(mine != NULL);
        memset(mine, 1, bytes);
        free(atomic_exchange(&left[next_random(&random) % LEFT], mine));
    }
}

static void churn_threads(const char *argument) {
    size_t waves = number(argument, 200), grown_early = 0, grown_late = 0;
    size_t before = resident_bytes();
    for (size_t wave = 0; wave < waves; wave++) {
        run_threads(50, live_briefly);
        if (governed()) {
            stats_now(); /* a server, if there is one, has seen all that was freed, then */
        }
        if (wave < waves / 4) {
            size_t now = grown_since(before);
            grown_early = now > grown_early ? now : grown_early;
        } else if (wave >= waves * 3 / 4) {
            size_t now = grown_since(before);
            grown_late = now > grown_late ? now : grown_late;
        }
    }
    for (size_t i = 0; i < LEFT; i++) {
        free(atomic_exchange(&left[i], NULL));
    }
    say("grown_early", grown_early);
    say("grown_late", grown_late);
    say("kept", grown_since(before));
}

/* More threads at once than CPUs, many times over; each allocates after all have begun. */
static pthread_barrier_t all_here;

static void wait_and_work(size_t thread) {
    void *mine = malloc(100 + thread);
    CHECK(mine != NULL);
    pthread_barrier_wait(&all_here);
    use_blocks(thread, 50);
    pthread_barrier_wait(&all_here);
    free(mine);
}

static void many_at_once(const char *unused) {
    (void)unused;
    CHECK(pthread_barrier_init(&all_here, NULL, 200) == 0);
    size_t before = resident_bytes();
    for (int round = 0; round < 3; round++) {
        run_threads(200, wait_and_work);
    }
    say("kept", grown_since(before));
}

static pthread_key_t keys[3];
static _Atomic(size_t) destroyed;

/* Frees, allocates, and, the first times, sets itself again. */
static void destroy(void *value) {
    size_t *held = value, again = *held;
    use_blocks(again, 30);
    free(held);
    atomic_fetch_add(&destroyed, 1);
    if (again > 0) {
        size_t *next = malloc(sizeof *next);
        CHECK(next != NULL);
        *next = again - 1;
        CHECK(pthread_setspecific(keys[again % 3], next) == 0);
    }
}

static void *end_with_keys(void *argument) {
    size_t thread = (size_t)(uintptr_t)argument;
    for (size_t i = 0; i < 3; i++) {
        size_t *held = malloc(sizeof *held);
        CHECK(held != NULL);
        *held = i;
        CHECK(pthread_setspecific(keys[i], held) == 0);
    }
    use_blocks(thread, 30);
    if (thread % 2 == 0) {
        pthread_exit(malloc(thread + 1));
    }
    return malloc(thread + 1);
}

/* By pthread_exit and by return, with destructors of thread-specific data. */
static void thread_ends(const char *argument) {
    size_t waves = number(argument, 40);
    for (size_t i = 0; i < 3; i++) {
        CHECK(pthread_key_create(&keys[i], destroy) == 0);
    }
    for (size_t wave = 0; wave < waves; wave++) {
        pthread_t threads[10];
        for (size_t i = 0; i < 10; i++) {
            CHECK(pthread_create(&threads[i], NULL, end_with_keys, (void *)(uintptr_t)i) == 0);
        }
        for (size_t i = 0; i < 10; i++) {
            void *result;
            CHECK(pthread_join(threads[i], &result) == 0 && result != NULL);
            CHECK(malloc_usable_size(result) >= i + 1);
            free(result);
        }
    }
    say("destroyed", atomic_load(&destroyed));
    CHECK(atomic_load(&destroyed) >= waves * 10 * 3);
    end_with_keys((void *)1);
}

static _Atomic(size_t) survived, cleaned;

static void clean_up(void *block) {
    free(block);
    atomic_fetch_add(&cleaned, 1);
}

/* A pending cancellation acts where the program says, and not within malloc or free. */
static void *work_until_cancelled(void *argument) {
    void *mine = malloc(1000);
    CHECK(mine != NULL);
    pthread_cleanup_push(clean_up, mine);
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL) == 0);
    pthread_barrier_wait(&all_here);
    pthread_barrier_wait(&all_here); /* it is pending now */
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL) == 0);
    for (int round = 0; round < 3; round++) {
        enum { BURST = 60 };
        void *burst[BURST];
        for (size_t i = 0; i < BURST; i++) {
            burst[i] = malloc(100 * KIB);
            CHECK(burst[i] != NULL);
            *(char *)burst[i] = 1;
        }
        for (size_t i = 0; i < BURST; i++) {
            free(burst[i]);
        }
        use_blocks((uintptr_t)argument, 50);
        if (governed()) {
            calm_trim(0);
        }
    }
    atomic_fetch_add(&survived, 1);
    pthread_testcancel();
    CHECK(false);
    pthread_cleanup_pop(0);
    return NULL;
}

static void thread_cancel(const char *unused) {
    (void)unused;
    CHECK(pthread_barrier_init(&all_here, NULL, 2) == 0);
    for (size_t i = 0; i < 100; i++) {
        pthread_t thread;
        void *result;
        CHECK(pthread_create(&thread, NULL, work_until_cancelled, (void *)(uintptr_t)i) == 0);
        pthread_barrier_wait(&all_here);
        CHECK(pthread_cancel(thread) == 0);
        pthread_barrier_wait(&all_here);
        CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
        CHECK_EQUAL(atomic_load(&survived), i + 1);
        CHECK_EQUAL(atomic_load(&cleaned), i + 1);
    }
    use_blocks(1, 1000);
}

/* main ends first; the process goes on. */
static pthread_t first_thread;

static void *outlive(void *unused) {
    (void)unused;
    CHECK(pthread_join(first_thread, NULL) == 0);
    use_blocks(1, 1000);
    run_threads(2, work_in_thread);
    say("outlived", 1);
    exit(0);
}

static void main_ends_first(const char *unused) {
    (void)unused;
    first_thread = pthread_self();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, outlive, NULL) == 0);
    use_blocks(2, 100);
    pthread_exit(NULL);
}

/* Its end, in every way, while others are at work. */
static void *work_for_ever(void *thread) {
    for (uint64_t round = 0;; round++) {
        use_blocks((uintptr_t)thread * 1000 + round, 200);
    }
    return NULL;
}

static void *exit_later(void *unused) {
    (void)unused;
    CHECK(pthread_join(first_thread, NULL) == 0);
    sleep_seconds(0.05);
    exit(23);
}

static void end_while_busy(const char *way) {
    pthread_t thread;
    for (uintptr_t i = 0; i < 3; i++) {
        CHECK(pthread_create(&thread, NULL, work_for_ever, (void *)i) == 0);
    }
    first_thread = pthread_self();
    if (strcmp(way, "pthread_exit") == 0) {
        CHECK(pthread_create(&thread, NULL, exit_later, NULL) == 0);
    }
    sleep_seconds(0.05);
    if (strcmp(way, "exit") == 0) {
        exit(20);
    } else if (strcmp(way, "_exit") == 0) {
        _exit(21);
    } else if (strcmp(way, "execve") == 0) {
        execl("/bin/sh", "sh", "-c", "exit 22", NULL);
    } else if (strcmp(way, "pthread_exit") == 0) {
        pthread_exit(NULL);
    } else if (strcmp(way, "abort") == 0) {
        abort();
    }
    CHECK(false);
}

/* ---- a helper thread of the library's own ---- */

static _Atomic(pid_t) worked;

/* Enough for the allocator to notice that there is a second thread. */
static void work_much(size_t thread) {
    atomic_store(&worked, (pid_t)syscall(SYS_gettid));
    use_blocks(thread, 3000);
    for (size_t i = 0; i < 100; i++) {
        void *block = malloc(100 * KIB);
        CHECK(block != NULL);
        free(block);
    }
}

static void count_threads(const char *argument) {
    say("alone", number_of_threads());
    use_blocks(1, 50);
    say("still_alone", number_of_threads());
    run_threads(1, work_much);
    /* A thread that was joined may be about to end yet. */
    WAIT_UNTIL(syscall(SYS_tgkill, getpid(), atomic_load(&worked), 0) != 0);
    say("after_a_thread", number_of_threads());
    if (strcmp(argument, "signals") == 0) {
        /* A signal to the process must not be delivered to the helper: it blocks all. */
        sigset_t all;
        sigfillset(&all);
        CHECK(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0);
        CHECK(kill(getpid(), SIGUSR1) == 0 && kill(getpid(), SIGTERM) == 0);
        sleep_seconds(0.1);
        sigset_t pending;
        CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1) && sigismember(&pending, SIGTERM));
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"fork-storm", fork_storm},
        {"forks-at-once", forks_at_once},
        {"fork-deep", fork_deep},
        {"fork-in-flight", fork_in_flight},
        {"child-frees", child_frees},
        {"fork-handlers", fork_handlers},
        {"prefork", prefork},
        {"spawn", spawn_others},
        {"children", children},
        {"child-has-no-number", child_has_no_number},
        {"unregistered", unregistered},
        {"unregistered-creator", unregistered_creator},
        {"become-nobody", become_nobody},
        {"churn", churn_threads},
        {"many-at-once", many_at_once},
        {"thread-ends", thread_ends},
        {"thread-cancel", thread_cancel},
        {"main-ends-first", main_ends_first},
        {"end-while-busy", end_while_busy},
        {"count-threads", count_threads},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
