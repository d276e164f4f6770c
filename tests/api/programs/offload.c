/*
 * libcalmoffload from outside: offload CASE [ARGUMENT]. The server is a thread of this process that is named
 * calmalloc, and the first of them; a helper may be another one. A debugger, which is a child of the program,
 * stops the server only.
 */
#include "api.h"
#include "names.h"

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
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>

/* Without a stream: this is also read where no block may be had. */
static size_t read_task(int thread, const char *file, char *text, size_t size) {
    char path[96];
    snprintf(path, sizeof path, "/proc/self/task/%d/%s", thread, file);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = descriptor < 0 ? 0 : read(descriptor, text, size - 1);
    CHECK(length >= 0);
    text[length] = '\0';
    if (descriptor >= 0) {
        close(descriptor);
    }
    return (size_t)length;
}

static size_t servers(int *thread) {
    size_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        char name[64];
        int task = atoi(entry->d_name);
        if (task > 0 && read_task(task, "comm", name, sizeof name) > 0 && strcmp(name, "calmalloc\n") == 0) {
            *thread = count == 0 || task < *thread ? task : *thread;
            count++;
        }
    }
    CHECK(closedir(tasks) == 0);
    return count;
}

/* Its name comes a moment after it. */
static int the_server(void) {
    int thread = 0;
    double until = seconds_now() + TIMEOUT_S;
    while (servers(&thread) == 0) {
        CHECK(seconds_now() < until);
        sleep_seconds(0.001);
    }
    return thread;
}

/* ---- a debugger ---- */

enum { STOP = 's', GO_ON = 'g', CANNOT_STOP = 'c' };

static struct { int pid, orders, answers; } debugger;

/* Whether a stopped thread is in a system call that waits for others: then it holds no lock. */
static bool waits(int thread) {
    char path[64], call[64] = "";
    snprintf(path, sizeof path, "/proc/%d/syscall", thread);
    FILE *file = fopen(path, "re");
    CHECK(file != NULL && fgets(call, sizeof call, file) != NULL && fclose(file) == 0);
    return strtol(call, NULL, 10) == SYS_futex;
}

/* While it has the heap's lock, clients would wait for it as for any thread that is stopped within malloc. */
static void stop_thread(int thread) {
    double until = seconds_now() + TIMEOUT_S;
    for (;;) {
        int status;
        CHECK(ptrace(PTRACE_INTERRUPT, thread, NULL, NULL) == 0);
        CHECK(waitpid(thread, &status, __WALL) == thread && WIFSTOPPED(status));
        if (waits(thread) || seconds_now() > until) {
            return;
        }
        CHECK(ptrace(PTRACE_CONT, thread, NULL, NULL) == 0);
        sleep_seconds(0.001);
    }
}

static void debug(int thread, int orders, int answers) {
    char order = CANNOT_STOP;
    if (ptrace(PTRACE_SEIZE, thread, NULL, NULL) != 0) {
        CHECK(write(answers, &order, 1) == 1);
        return;
    }
    do {
        if (order == STOP) {
            stop_thread(thread);
        } else if (order == GO_ON) {
            CHECK(ptrace(PTRACE_CONT, thread, NULL, NULL) == 0);
        }
        char answer = order == CANNOT_STOP ? GO_ON : order;
        CHECK(write(answers, &answer, 1) == 1);
    } while (read(orders, &order, 1) == 1);
}

static void ask_debugger(char order) {
    char answer = 0;
    CHECK(write(debugger.orders, &order, 1) == 1);
    CHECK(read(debugger.answers, &answer, 1) == 1 && answer == order);
}

static void start_debugger(void) {
    int orders[2], answers[2], thread = the_server();
    CHECK(pipe2(orders, O_CLOEXEC) == 0 && pipe2(answers, O_CLOEXEC) == 0);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* only Yama knows it */
    debugger.pid = fork();
    CHECK(debugger.pid >= 0);
    if (debugger.pid == 0) {
        CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
        close(orders[1]);
        debug(thread, orders[0], answers[1]);
        _exit(0);
    }
    debugger.orders = orders[1];
    debugger.answers = answers[0];
    char answer = 0;
    CHECK(read(debugger.answers, &answer, 1) == 1);
    if (answer != GO_ON) {
        fprintf(stderr, "no thread may be traced here\n");
        _Exit(CANNOT);
    }
}

static void end_debugger(void) {
    CHECK(close(debugger.orders) == 0);
    check_child(debugger.pid);
}

/* ---- stopped for seconds ---- */

enum { OLD = 20000, WORKERS = 4 };

static void *old[OLD];
static void **tiny;
static size_t tiny_count;

static size_t old_bytes(size_t i) {
    return i % 50 == 0 ? 40 * KIB + i * 16 : 16 + i * 7 % 3000;
}

static void make_old(size_t i) {
    old[i] = malloc(old_bytes(i));
    CHECK(old[i] != NULL);
    fill(old[i], old_bytes(i), i);
}

static void free_old(size_t i) {
    CHECK(is_filled(old[i], old_bytes(i), i));
    free(old[i]);
    old[i] = NULL;
}

/* Zeros, also where a block was used before. */
static void use_zeroed(size_t bytes) {
    for (int i = 0; i < 3; i++) {
        unsigned char *block = calloc(1, bytes);
        CHECK(block != NULL && is_zero(block, bytes));
        memset(block, 0xFF, bytes);
        free(block);
    }
}

static void use_aligned(size_t alignment, size_t bytes) {
    void *block = NULL;
    CHECK(posix_memalign(&block, alignment, bytes) == 0 && (uintptr_t)block % alignment == 0);
    fill(block, bytes, alignment);
    CHECK(is_filled(block, bytes, alignment));
    free(block);
}

static void use_all_kinds(void) {
    for (size_t bytes = 10; bytes < 3 * MIB; bytes *= 9) {
        use_zeroed(bytes);
        use_aligned(64, bytes);
        use_aligned(128 * KIB, bytes);
        void *block = malloc(bytes);
        CHECK(block != NULL);
        fill(block, bytes, bytes);
        block = realloc(block, bytes * 5);
        CHECK(block != NULL && is_filled(block, bytes / 8 * 8, bytes));
        block = realloc(block, bytes / 2);
        CHECK(block != NULL && is_filled(block, bytes / 16 * 8, bytes));
        free(block);
    }
}

static void work_a_little(size_t thread) {
    use_blocks(thread, 1000);
}

static size_t share_of(size_t thread, size_t all) {
    return all / WORKERS * thread;
}

/* Frees half of the old blocks, and moves or replaces the others. */
static void live_without_it(size_t thread) {
    for (size_t i = share_of(thread, OLD); i < share_of(thread + 1, OLD); i++) {
        if (i % 4 == 0) {
            CHECK(is_filled(old[i], old_bytes(i), i));
            old[i] = realloc(realloc(old[i], old_bytes(i) * 3), old_bytes(i));
            CHECK(old[i] != NULL && is_filled(old[i], old_bytes(i) / 8 * 8, i));
            fill(old[i], old_bytes(i), i);
        } else if (i % 2 == 0) {
            free_old(i);
            make_old(i);
        }
    }
    use_all_kinds();
    use_blocks(thread, 3000);
}

static void free_tiny(size_t thread) {
    for (size_t i = share_of(thread, tiny_count); i < share_of(thread + 1, tiny_count); i++) {
        CHECK(is_filled(tiny[i], 48, i));
        free(tiny[i]);
    }
}

/* Blocks that the parent's server had are lost; the child has everything else. */
static void fork_without_it(size_t i) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        use_all_kinds();
        for (size_t at = i % 3; at < OLD; at += 3) {
            free_old(at);
        }
        run_threads(2, work_a_little);
        stats_now();
        calm_trim(0);
        pid_t grandchild = fork();
        CHECK(grandchild >= 0);
        if (grandchild == 0) {
            use_blocks(i, 500);
            _exit(0);
        }
        check_child(grandchild);
        if (i % 2 == 0) {
            exit(0);
        }
        _exit(0);
    }
    check_child(child);
}

/* Until what threads want of it is had from it. */
static void wait_until_served(void) {
    double until = seconds_now() + TIMEOUT_S;
    for (;;) {
        uint64_t before = counter_named("offload_calls");
        for (size_t i = 0; i < 20; i++) {
            free(malloc(5 * MIB + i * 64 * KIB)); /* so large that none is ready */
        }
        if (counter_named("offload_calls") > before + 1) {
            return;
        }
        CHECK(seconds_now() < until);
        sleep_seconds(0.01);
    }
}

static void stop_for(double seconds) {
    double until = seconds_now() + seconds;
    uint64_t lost = counter_named("offload_unresponsive"), calls = counter_named("offload_calls");
    ask_debugger(STOP);
    /* With so many of one class some go by the ring, and most past it. */
    run_threads(WORKERS, free_tiny);
    for (size_t round = 0; round == 0 || seconds_now() < until; round++) {
        run_threads(WORKERS, live_without_it);
        if (round == 0) {
            fork_without_it(0);
            fork_without_it(1);
        }
    }
    CHECK(counter_named("offload_unresponsive") > lost);
    CHECK(counter_named("offload_calls") <= calls + 1);
    ask_debugger(GO_ON);
    wait_until_served();
    run_threads(WORKERS, live_without_it);
}

static void make_all(void) {
    for (size_t i = 0; i < OLD; i++) {
        make_old(i);
    }
    for (size_t i = 0; i < tiny_count; i++) {
        tiny[i] = malloc(48);
        CHECK(tiny[i] != NULL);
        fill(tiny[i], 48, i);
    }
}

/* As far as calm_trim gets: where the server is late, that takes more than one. */
static void trim_to(uint64_t in_use) {
    double until = seconds_now() + TIMEOUT_S;
    for (;;) {
        calm_trim(0);
        struct calm_stats stats = stats_now();
        if (stats.in_use <= in_use + MIB && stats.dirty <= MIB) {
            return;
        }
        if (seconds_now() > until) {
            fprintf(stderr, "%zu KiB in use, not %zu, and %zu dirty\n", (size_t)stats.in_use / KIB,
                    (size_t)in_use / KIB, (size_t)stats.dirty / KIB);
            _Exit(1);
        }
        sleep_seconds(0.05);
    }
}

/* For so many seconds, and so many frees. What the clients freed meanwhile comes back, and none of it is
 * gone.
 */
static void stopped(const char *argument) {
    char *end;
    double seconds = strtod(argument, &end);
    CHECK(*end == ',');
    tiny_count = strtoul(end + 1, NULL, 10);
    tiny = own_pages(tiny_count * sizeof *tiny);
    memset(tiny, 0xFF, tiny_count * sizeof *tiny);
    memset(old, 0xFF, sizeof old);
    use_blocks(1, 1000);
    start_debugger();
    calm_trim(0);
    size_t resident = resident_bytes();
    uint64_t in_use = stats_now().in_use;
    for (int round = 0; round < 2; round++) {
        make_all();
        CHECK_ACCOUNT(stats_now().in_use >= in_use + 40 * MIB);
        stop_for(seconds);
        for (size_t i = 0; i < OLD; i++) {
            free_old(i);
        }
        trim_to(in_use);
    }
    say("resident_left", grown_since(resident));
    end_debugger();
    wait_until_served();
}

/* ---- stopped at any moment ---- */

static atomic_bool stop;

static void work_until_stopped(size_t thread) {
    for (uint64_t round = 0; !atomic_load(&stop); round++) {
        use_blocks(thread * 1000 + round, 200);
    }
}

static void stop_often(size_t thread) {
    if (thread > 0) {
        work_until_stopped(thread);
        return;
    }
    for (size_t i = 0; i < 12; i++) {
        ask_debugger(STOP);
        sleep_seconds(0.03 * (double)(i % 4));
        pid_t child = i % 3 == 0 ? fork() : -1;
        if (child == 0) {
            use_blocks(i, 1000);
            _exit(0);
        }
        ask_debugger(GO_ON);
        if (child > 0) {
            check_child(child);
        }
        sleep_seconds(0.02);
    }
    atomic_store(&stop, true);
}

static void stops(const char *unused) {
    (void)unused;
    use_blocks(1, 1000);
    start_debugger();
    run_threads(WORKERS, stop_often);
    end_debugger();
    wait_until_served();
}

/* ---- forks while it starts ---- */

static atomic_int stage;

/* The tracer delays each thread's first clone: here that of a process that is nothing, else fork's.
 */
static void *start_server(void *unused) {
    long child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        _exit(0);
    }
    check_child((int)child);
    atomic_store(&stage, 1);
    while (atomic_load(&stage) != 2) {
        sleep_seconds(0.001);
    }
    sleep_seconds(0.02);
    work_until_stopped(1);
    return unused;
}

/* In the grandchild, whose parent's server started while the process was copied, all is given back. */
static void fork_while_starting(const char *unused) {
    (void)unused;
    use_blocks(1, 1000);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, start_server, NULL) == 0);
        while (atomic_load(&stage) != 1) {
            sleep_seconds(0.001);
        }
        atomic_store(&stage, 2);
        pid_t grandchild = fork();
        CHECK(grandchild >= 0);
        if (grandchild == 0) {
            use_blocks(2, 1000);
            void *block = malloc(20 * MIB);
            CHECK(block != NULL);
            uint64_t in_use = stats_now().in_use;
            fill(block, 20 * MIB, 1);
            free(block);
            trim_to(in_use - 20 * MIB);
            _exit(0);
        }
        check_child(grandchild);
        _exit(0);
    }
    check_child(child);
}

/* ---- the thread ---- */

/* Nanoseconds that it ran, and how often. */
static void see_run(int thread, uint64_t *ns, uint64_t *times) {
    char text[128];
    uint64_t waited;
    CHECK(read_task(thread, "schedstat", text, sizeof text) > 0);
    char *at = text;
    *ns = strtoull(at, &at, 10);
    waited = strtoull(at, &at, 10);
    (void)waited;
    *times = strtoull(at, &at, 10);
}

/* The server sleeps while no client needs it, and then serves again. */
static void idle(const char *unused) {
    (void)unused;
    use_blocks(1, 1000);
    run_threads(WORKERS, work_a_little);
    int thread = the_server();
    uint64_t ns = 0, times = 0, ns_before, times_before;
    double until = seconds_now() + TIMEOUT_S;
    do {
        CHECK(seconds_now() < until);
        see_run(thread, &ns_before, &times_before);
        sleep_seconds(1);
        see_run(thread, &ns, &times);
    } while (times > times_before);
    CHECK_EQUAL(ns, ns_before);
    wait_until_served();
}

/* A child starts a server of its own once it needs it; no process has two. */
static void one_each(const char *unused) {
    (void)unused;
    int thread;
    use_blocks(1, 1000);
    the_server();
    run_threads(WORKERS, work_a_little);
    say("parents", servers(&thread));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        use_blocks(2, 1000);
        the_server();
        run_threads(WORKERS, work_a_little);
        say("childs", servers(&thread));
        _exit(0);
    }
    check_child(child);
    stats_now();
}

static double seconds_run(void) {
    struct timespec run;
    CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &run) == 0);
    return (double)run.tv_sec + (double)run.tv_nsec / 1e9;
}

static size_t open_files(int thread) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/fd", thread);
    DIR *folder = opendir(path);
    CHECK(folder != NULL);
    size_t count = 0;
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        count += entry->d_name[0] != '.';
    }
    closedir(folder);
    return count;
}

/* Which CPU is its own, seen from a busy thread that stays on the one named. */
static void placed(const char *cpu) {
    enum { CPUS = 8192 };
    cpu_set_t one[CPUS / CPU_SETSIZE];
    size_t number = strtoul(cpu, NULL, 10);
    /* Where the server may run is where the program might when it had its first block. */
    use_blocks(1, 1);
    CHECK(number < CPUS);
    CPU_ZERO_S(sizeof one, one);
    CPU_SET_S(number, sizeof one, one);
    CHECK(sched_setaffinity(0, sizeof one, one) == 0);
    while (seconds_run() < 0.2) {
    }
    /* Before it serves it has not chosen: till then it may run where the thread does that started it. */
    uint64_t random = 1;
    for (double until = seconds_now() + TIMEOUT_S; counter_named("offload_calls") == 0;) {
        CHECK(seconds_now() < until);
        use_blocks(random++, 1000);
    }
    char status[4096];
    static const char key[] = "\nCpus_allowed_list:\t";
    CHECK(read_task(the_server(), "status", status, sizeof status) > 0);
    const char *list = strstr(status, key);
    CHECK(list != NULL);
    char *end;
    unsigned long own = strtoul(list + strlen(key), &end, 10);
    CHECK(*end == '\n');
    say("server_cpu", own);
    say("server_files", open_files(the_server()));
}

/* Where it may decline. With one thread: so there is no helper either. */
static void none(const char *unused) {
    (void)unused;
    int thread;
    use_blocks(1, 1000);
    /* Its name comes a moment after it, if it comes. */
    for (int i = 0; i < 50 && servers(&thread) == 0; i++) {
        sleep_seconds(0.01);
    }
    say("servers", servers(&thread));
    say("records", counter_named("offload_messages") + counter_named("offload_calls"));
}

/* Settings change while it runs, also those that make it give back. */
static void change_settings(size_t thread) {
    if (thread > 0) {
        work_until_stopped(thread);
        return;
    }
    static const char *const prices[] = {"0", "160", "1600", "auto"};
    for (size_t i = 0; i < 40; i++) {
        CHECK(calm_set("memory_per_cpu", prices[i % 4]) == 0);
        CHECK(calm_set("test_policy", i % 8 < 4 ? "paper" : "adaptive") == 0);
        CHECK(calm_set("background", i % 2 == 0 ? "off" : "on") == 0);
        CHECK(calm_set("profile", i % 5 == 0 ? "64k" : "0") == 0 || errno == ENOENT); /* CALM_PROFILE=OFF */
        use_blocks(i, 100);
    }
    atomic_store(&stop, true);
}

static void settings(const char *unused) {
    (void)unused;
    run_threads(WORKERS, change_settings);
    static const char *const fixed[] = {"server_cpu", "test_sync", "test_server_timeout"};
    static const char *const good[] = {"sibling", "on", "10"};
    for (size_t i = 0; i < 3; i++) {
        errno = 0;
        CHECK(calm_set(fixed[i], good[i]) == -1 && errno == EBUSY);
        CHECK(calm_set(fixed[i], "perhaps") == -1 && errno == EINVAL);
        CHECK(calm_set(fixed[i], "") == -1 && errno == EINVAL);
    }
    CHECK(calm_set("server_cpu", "0") == -1 && errno == EBUSY);
    CHECK(calm_set("server_cpu", "-1") == -1 && errno == EINVAL);
    wait_until_served();
}

/* ---- misuse ---- */

/* So many frees that the rings are full, and then one too many, while no server takes them. */
static void misuse_while_stopped(const char *bytes) {
    enum { BLOCKS = 20000 };
    size_t each = strtoul(bytes, NULL, 10);
    void **blocks = own_pages(BLOCKS * sizeof *blocks);
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(each);
        CHECK(blocks[i] != NULL);
    }
    start_debugger();
    ask_debugger(STOP);
    for (size_t i = 0; i < BLOCKS; i++) {
        free(blocks[i]);
    }
    printf("pointer %#llx\n", (unsigned long long)(uintptr_t)blocks[BLOCKS - 10]);
    fflush(stdout);
    free(hidden(blocks[BLOCKS - 10]));
    ask_debugger(GO_ON);
    wait_until_served();
    malloc_trim(0);
    /* With misuse=warn. */
    end_debugger();
    use_all_kinds();
    say("lived", 1);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"stopped", stopped}, {"stops", stops},       {"fork-while-starting", fork_while_starting},
        {"idle", idle},       {"one-each", one_each}, {"placed", placed},
        {"none", none},       {"settings", settings}, {"misuse-while-stopped", misuse_while_stopped},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
