/*
 * Privileges that a program gives up, and their effect: privileges CASE. Its threads use the allocator until
 * the allocator has a thread, if it starts one; the program then acts like a daemon or a sandbox. Runs as
 * root, and also under the C library's malloc.
 */
#include "../../c/helpers/strict_filter.h"
#include "api.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

#define NOBODY  65534
#define THREADS 3

/* ---- threads that come to the heap, and the allocator's own ---- */

static void use_heap(size_t thread) {
    use_blocks(thread + 1, 3000);
    for (size_t i = 0; i < 64; i++) {
        free(malloc(40 * KIB));
    }
}

static pthread_barrier_t barrier;

/* It lives until it may end: one that is about to is passed over by the C library's setresuid. */
static void *use_heap_and_wait(void *thread) {
    use_heap((uintptr_t)thread);
    pthread_barrier_wait(&barrier);
    return NULL;
}

/* A line of a thread's status, without its name; empty if the thread is gone. */
static void read_status(const char *thread, const char *name, char *value, size_t size) {
    char path[320];
    snprintf(path, sizeof path, "/proc/self/task/%s/status", thread);
    FILE *status = fopen(path, "re");
    char line[1024];
    value[0] = '\0';
    while (status != NULL && fgets(line, sizeof line, status) != NULL) {
        if (strncmp(line, name, strlen(name)) == 0) {
            snprintf(value, size, "%s", line + strlen(name));
        }
    }
    if (status != NULL) {
        fclose(status);
    }
}

/* The number of the allocator's thread; 0 if there is none. */
static int own_thread(void) {
    int found = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char name[64];
        read_status(task->d_name, "Name:\t", name, sizeof name);
        if (strcmp(name, "calmalloc\n") == 0) {
            found = atoi(task->d_name);
        }
    }
    closedir(tasks);
    return found;
}

/* Until there is one, or, without the library, once. */
static void use_until_tended(void) {
    double until = seconds_now() + TIMEOUT_S;
    do {
        run_threads(THREADS, use_heap);
        CHECK(seconds_now() < until);
    } while (governed() && own_thread() == 0);
}

/* How many threads have not this value on that line. */
static size_t count_others(const char *name, const char *wanted) {
    size_t others = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char value[1024];
        read_status(task->d_name, name, value, sizeof value);
        others += task->d_name[0] != '.' && value[0] != '\0' && strcmp(value, wanted) != 0;
    }
    closedir(tasks);
    return others;
}

/* ---- cases ---- */

/* All threads are of the new user, then and later, and the allocator goes on. */
static void drop_user(const char *unused) {
    (void)unused;
    char wanted[64];
    use_until_tended();
    CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0);
    CHECK(setresuid(NOBODY, NOBODY, NOBODY) == 0);
    snprintf(wanted, sizeof wanted, "%d\t%d\t%d\t%d\n", NOBODY, NOBODY, NOBODY, NOBODY);
    CHECK_EQUAL(count_others("Uid:\t", wanted), 0);
    CHECK_EQUAL(count_others("Gid:\t", wanted), 0);
    run_threads(THREADS, use_heap);
    CHECK_EQUAL(count_others("Uid:\t", wanted), 0);
}

/* In a child: its user changes while threads, the allocator's among them, begin to run. */
static void drop_user_soon(int delay) {
    pthread_t threads[THREADS];
    char wanted[64];
    snprintf(wanted, sizeof wanted, "%d\t%d\t%d\t%d\n", NOBODY, NOBODY, NOBODY, NOBODY);
    CHECK(pthread_barrier_init(&barrier, NULL, THREADS + 1) == 0);
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, use_heap_and_wait, (void *)i) == 0);
    }
    for (int i = 0; i < delay; i++) {
        free(malloc(1 + (size_t)i % 2000));
    }
    CHECK(setresuid(NOBODY, NOBODY, NOBODY) == 0);
    CHECK_EQUAL(count_others("Uid:\t", wanted), 0);
    pthread_barrier_wait(&barrier);
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK_EQUAL(count_others("Uid:\t", wanted), 0);
    exit(0);
}

static void drop_user_early(const char *unused) {
    (void)unused;
    for (int round = 0; round < 60; round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            drop_user_soon(round * 200);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* A child that the allocator was not told of has none of its threads, and waits for none. */
static void drop_user_unseen(const char *unused) {
    (void)unused;
    use_until_tended();
    long child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    CHECK(child >= 0);
    if (child == 0) {
        struct rusage before;
        struct rusage after;
        getrusage(RUSAGE_SELF, &before);
        bool dropped = setresuid(NOBODY, NOBODY, NOBODY) == 0 && getuid() == NOBODY;
        getrusage(RUSAGE_SELF, &after);
        use_heap(0);
        _exit(dropped && after.ru_nvcsw - before.ru_nvcsw < 50 ? 0 : 1);
    }
    int status;
    CHECK(waitpid((pid_t)child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Of the allocator's thread, which does away with both as it starts. */
static bool has_capabilities(int thread) {
    char number[32];
    char value[64];
    snprintf(number, sizeof number, "%d", thread);
    read_status(number, "CapPrm:\t", value, sizeof value);
    return value[0] == '\0' || strtoull(value, NULL, 16) != 0;
}

static bool has_files(int thread) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/fd", thread);
    DIR *descriptors = opendir(path);
    size_t count = 0;
    for (struct dirent *one; descriptors != NULL && (one = readdir(descriptors)) != NULL;) {
        count += one->d_name[0] != '.';
    }
    bool gone = descriptors == NULL || closedir(descriptors) != 0;
    return gone || count > 1; /* one that it may just be reading */
}

/* No capabilities, and none of the program's files. */
static void unprivileged(const char *unused) {
    (void)unused;
    double until = seconds_now() + TIMEOUT_S;
    int own;
    do {
        use_until_tended();
        own = own_thread();
        CHECK(seconds_now() < until);
    } while (own == 0 || has_capabilities(own) || has_files(own));
}

/* As in a container that was made before these system calls: its filter ends who makes them. */
static void contained(const char *unused) {
    (void)unused;
    static struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_close_range, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_capset, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof filter[0], .filter = filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    execl("/proc/self/exe", "privileges", "in-container", (char *)NULL);
    CHECK(!"reached");
}

static void in_container(const char *unused) {
    (void)unused;
    use_until_tended();
}

/* A program of one thread may end as a thread does; its status is not that of a thread of the allocator's. */
static void exit_as_thread(const char *unused) {
    (void)unused;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        double until = seconds_now() + TIMEOUT_S;
        while (own_thread() == 0) {
            char *blocks[64]; /* waves that are worth keeping */
            for (size_t i = 0; i < 64; i++) {
                blocks[i] = malloc(MIB);
                CHECK(blocks[i] != NULL);
                memset(blocks[i], 1, MIB);
            }
            for (size_t i = 0; i < 64; i++) {
                free(blocks[i]);
            }
            CHECK(seconds_now() < until);
        }
        syscall(SYS_exit, 3);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 3);
}

static void no_new_privileges(const char *unused) {
    (void)unused;
    use_until_tended();
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1);
    run_threads(THREADS, use_heap);
    CHECK_EQUAL(count_others("NoNewPrivs:\t", "1\n"), 0);
    errno = 0;
    CHECK(prctl(-1) == -1 && errno == EINVAL);
    CHECK(syscall(SYS_getpid) == getpid());
    CHECK(syscall(-1L) == -1 && errno == ENOSYS);
    CHECK(syscall(SYS_mmap, NULL, (size_t)4096, 0, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L) != -1);
}

/* Once its threads have ended, a program may enter other namespaces. */
static void new_namespace(const char *unused) {
    (void)unused;
    use_until_tended();
    int own = open("/proc/self/ns/uts", O_RDONLY | O_CLOEXEC);
    CHECK(own >= 0);
    if (unshare(CLONE_NEWUSER) != 0) {
        CHECK(errno != EINVAL);
        exit(CANNOT);
    }
    CHECK(unshare(CLONE_NEWUTS) == 0);
    CHECK(setns(own, CLONE_NEWUTS) == -1 && errno == EPERM); /* of the user namespace that was left */
    CHECK(close(own) == 0);
    run_threads(THREADS, use_heap);
}

/* Without any wrapper: within a second or so the program is alone again. */
static void alone_again(const char *unused) {
    (void)unused;
    use_until_tended();
    double until = seconds_now() + TIMEOUT_S;
    while (number_of_threads() > 1) {
        CHECK(seconds_now() < until);
        free(malloc(100)); /* what the first thread does alone brings none back */
        free(malloc(40 * KIB));
        sleep_seconds(0.01);
    }
    CHECK(own_thread() == 0);
}

static void *use_pinned(void *unused) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    const struct sched_param first = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_FIFO, &first) != 0) {
        exit(CANNOT);
    }
    use_heap(0);
    return unused;
}

/* The allocator's thread has no real-time priority and is bound to no CPU, whichever thread starts it. */
static void scheduling(const char *unused) {
    (void)unused;
    cpu_set_t all;
    cpu_set_t held;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    double until = seconds_now() + TIMEOUT_S;
    int own;
    do {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, use_pinned, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(seconds_now() < until);
        own = own_thread();
    } while (own == 0 || sched_getscheduler(own) != SCHED_OTHER ||
             sched_getaffinity(own, sizeof held, &held) != 0 || !CPU_EQUAL(&held, &all));
}

/* ---- filters ---- */

/* What a program that lives long does: waves of blocks of all sizes, for more than some epochs. */
static void *live_on(void *number) {
    enum { BLOCKS = 2000, WAVES = 12 };
    void **blocks = own_pages(BLOCKS * sizeof *blocks);
    pthread_barrier_wait(&barrier); /* started */
    pthread_barrier_wait(&barrier); /* filtered */
    uint64_t random = (uintptr_t)number + 1;
    for (size_t wave = 0; wave < WAVES; wave++) {
        for (size_t i = 0; i < BLOCKS; i++) {
            size_t bytes = next_random(&random) % (i % 50 == 0 ? 3 * MIB : 5000);
            blocks[i] = i % 3 == 0 ? calloc(1, bytes) : malloc(bytes);
            CHECK(blocks[i] != NULL);
            memset(blocks[i], 1, bytes < 2 * KIB ? bytes : 2 * KIB);
        }
        for (size_t i = 0; i < BLOCKS; i++) {
            blocks[i] = realloc(blocks[i], 1 + next_random(&random) % 8000);
            CHECK(blocks[i] != NULL);
        }
        for (size_t i = 0; i < BLOCKS; i++) {
            free(blocks[i]);
        }
    }
    pthread_barrier_wait(&barrier);
    return NULL;
}

static void filtered(const char *how) {
    pthread_t threads[THREADS];
    if (strcmp(how, "at-once") != 0) {
        use_until_tended(); /* else none may be started later */
    }
    CHECK(pthread_barrier_init(&barrier, NULL, THREADS + 1) == 0);
    for (uintptr_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, live_on, (void *)i) == 0);
    }
    pthread_barrier_wait(&barrier);
    add_strict_filter(how);
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    use_blocks(7, 20000);
    free(malloc(200 * MIB));
    if (governed()) {
        calm_trim(0);
    }
    _exit(0);
}

/* The only thread of a program ends by a raw exit, for which there may be no call but that one. */
static void filtered_alone(const char *how) {
    use_blocks(7, 2000);
    add_strict_filter(how);
    use_blocks(8, 2000);
    syscall(SYS_exit, 0);
}

/* ---- in a signal handler that interrupted the allocator ---- */

static volatile sig_atomic_t given_up, refused;
static _Atomic(bool) enough;

static void give_up_in_handler(int signal) {
    (void)signal;
    refused |= setuid(geteuid()) != 0;
    given_up++;
}

static void *use_heap_beside(void *unused) {
    while (!atomic_load(&enough)) {
        use_heap(2);
    }
    return unused;
}

static void in_handler(const char *argument) {
    (void)argument;
    use_until_tended();
    sigset_t alarms;
    sigemptyset(&alarms);
    sigaddset(&alarms, SIGALRM);
    CHECK(pthread_sigmask(SIG_BLOCK, &alarms, NULL) == 0);
    pthread_t beside;
    CHECK(pthread_create(&beside, NULL, use_heap_beside, NULL) == 0);
    CHECK(pthread_sigmask(SIG_UNBLOCK, &alarms, NULL) == 0);
    struct sigaction action = {.sa_handler = give_up_in_handler, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    for (suseconds_t round = 0; round < 300; round++) {
        struct itimerval soon = {.it_value = {0, 1 + round}};
        sig_atomic_t before = given_up;
        CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
        while (given_up == before) {
            use_blocks((uint64_t)round, 100);
            free(malloc(40 * KIB));
        }
    }
    atomic_store(&enough, true);
    CHECK(pthread_join(beside, NULL) == 0);
    CHECK(!refused);
    use_blocks(7, 20000);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"drop-user", drop_user},
        {"no-new-privileges", no_new_privileges},
        {"drop-user-early", drop_user_early},
        {"drop-user-unseen", drop_user_unseen},
        {"new-namespace", new_namespace},
        {"alone-again", alone_again},
        {"unprivileged", unprivileged},
        {"scheduling", scheduling},
        {"contained", contained},
        {"in-container", in_container},
        {"exit-as-thread", exit_as_thread},
        {"filtered", filtered},
        {"filtered-alone", filtered_alone},
        {"in-handler", in_handler},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
