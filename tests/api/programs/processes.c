/* Forks, and other programs that are started: processes CASE [ARGUMENT]. */
#include "api.h"
#include "names.h"

#include <grp.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

extern char **environ;

/* ---- forks ---- */

static atomic_bool stop;

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
    forks_wanted = number_or(argument, 40);
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
    forks_wanted = number_or(argument, 15);
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
    forks_wanted = number_or(argument, 25);
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
    forks_wanted = number_or(argument, 40);
    run_threads(3, fork_or_work);
}

/*
 * A server that forks its workers: what each of them has to itself, at rest after work, and how much of that
 * is neither dirty nor cached by the allocator's own account.
 */
static void prefork(const char *argument) {
    size_t children = number_or(argument, 12);
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
                CHECK(stats.dirty <= stats.dirty_limit && stats.cached <= stats.cached_limit);
                size_t known = stats.dirty + stats.cached;
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
        {"become-nobody", become_nobody},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
