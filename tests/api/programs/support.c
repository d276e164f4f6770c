#include "api.h"
#include "names.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

bool governed(void) {
#if defined USE_CALM_NAMES || defined LINKED
    return true;
#else
    return calm_malloc != NULL && calm_stats != NULL;
#endif
}

static pid_t first_process;

__attribute__((constructor)) static void remember_process(void) {
    first_process = getpid();
}

struct calm_stats stats_now(void) {
    struct calm_stats stats;
    memset(&stats, 0xEE, sizeof stats);
    CHECK(calm_stats(&stats, sizeof stats) == 0);
    CHECK(stats.version >= CALM_STATS_VERSION && stats.size == sizeof stats);
    CHECK_EQUAL(stats.in_use + stats.dirty, stats.footprint);
    /* A forked child also purges what its parent had freed. */
    CHECK(stats.purged <= stats.dirtied || getpid() != first_process);
    return stats;
}

uint64_t counter_named(const char *name) {
    static char json[16384];
    char key[64];
    CHECK(calm_stats_json(json, sizeof json) > 0);
    snprintf(key, sizeof key, "\"%s\": ", name);
    const char *found = strstr(json, key);
    return found == NULL ? 0 : strtoull(found + strlen(key), NULL, 10);
}

bool server_was_late(void) {
    return counter_named("offload_unresponsive") > 0;
}

static uint64_t accounts, accounts_excused;

bool account(bool holds) {
    accounts++;
    if (holds) {
        return true;
    }
    struct calm_stats stats = stats_now();
    bool excused = server_was_late() || stats.purges_epoch > 0;
    accounts_excused += excused;
    return excused;
}

void say(const char *name, uint64_t value) {
    printf("%s %llu\n", name, (unsigned long long)value);
    fflush(stdout);
}

/* Without a stream: its buffer would lie in the heap that is being looked at. */
static size_t read_small(const char *path, char *text, size_t size) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(descriptor >= 0);
    size_t length = 0;
    for (;;) {
        ssize_t got = read(descriptor, text + length, size - 1 - length);
        CHECK(got >= 0);
        if (got == 0) {
            break;
        }
        length += (size_t)got;
    }
    text[length] = '\0';
    CHECK(close(descriptor) == 0);
    return length;
}

static size_t number_after(const char *path, const char *name) {
    char text[8192], key[64];
    read_small(path, text, sizeof text);
    snprintf(key, sizeof key, "\n%s:", name);
    const char *at = strstr(text, key);
    CHECK(at != NULL);
    return strtoul(at + strlen(key), NULL, 10);
}

/* Not statm, whose pages are not the program's under an emulator of larger ones. */
size_t virtual_bytes(void) {
    return number_after("/proc/self/status", "VmSize") * KIB;
}

size_t resident_bytes(void) {
    return number_after("/proc/self/status", "VmRSS") * KIB;
}

size_t grown_since(size_t resident_before) {
    size_t now = resident_bytes();
    return now > resident_before ? now - resident_before : 0;
}

size_t rollup_bytes(const char *name) {
    return number_after("/proc/self/smaps_rollup", name) * KIB;
}

size_t number_of_threads(void) {
    return number_after("/proc/self/status", "Threads");
}

double seconds_now(void) {
    struct timespec now;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void sleep_seconds(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) != 0) {
        CHECK(errno == EINTR);
    }
}

static volatile size_t nothing;

size_t opaque(size_t value) {
    return value + nothing;
}

void *hidden(void *pointer) {
    return (void *)((uintptr_t)pointer + nothing);
}

static uint64_t word_at(uint64_t mark, size_t i) {
    uint64_t word = (mark + i) * 0x9E3779B97F4A7C15U;
    return word ^ (word >> 29);
}

/* Anywhere in a block. These loops are most of what many tests do; memcpy would be a call, without builtins.
 */
typedef uint64_t __attribute__((aligned(1), may_alias)) any_word;

void fill(void *block, size_t bytes, uint64_t mark) {
    any_word *words = block;
    size_t whole = bytes / 8;
    for (size_t i = 0; i < whole; i++) {
        words[i] = word_at(mark, 8 * i);
    }
    uint64_t word = word_at(mark, 8 * whole);
    memcpy(words + whole, &word, bytes % 8);
}

bool is_filled(const void *block, size_t bytes, uint64_t mark) {
    const any_word *words = block;
    size_t whole = bytes / 8;
    uint64_t wrong = 0;
    for (size_t i = 0; i < whole; i++) {
        wrong |= words[i] ^ word_at(mark, 8 * i);
    }
    uint64_t word = word_at(mark, 8 * whole);
    return wrong == 0 && memcmp(words + whole, &word, bytes % 8) == 0;
}

bool is_zero(const void *block, size_t bytes) {
    static const uint64_t zero;
    const any_word *words = block;
    size_t whole = bytes / 8;
    uint64_t wrong = 0;
    for (size_t i = 0; i < whole; i++) {
        wrong |= words[i];
    }
    return wrong == 0 && memcmp(words + whole, &zero, bytes % 8) == 0;
}

uint64_t next_random(uint64_t *state) {
    uint64_t value = *state += 0x9E3779B97F4A7C15U;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
    return value ^ (value >> 31);
}

void use_blocks(uint64_t random, size_t operations) {
    enum { HELD = 64 };
    struct {
        void *block;
        size_t bytes;
    } held[HELD] = {0};
    for (size_t i = 0; i < operations + HELD; i++) {
        size_t at = i < operations ? next_random(&random) % HELD : i - operations;
        if (held[at].block != NULL) {
            CHECK(is_filled(held[at].block, held[at].bytes, held[at].bytes));
            free(held[at].block);
            held[at].block = NULL;
        }
        if (i < operations) {
            size_t dice = next_random(&random) % 100;
            size_t most = dice < 70 ? 600 : (dice < 97 ? 20 * KIB : 600 * KIB);
            held[at].bytes = 1 + next_random(&random) % most;
            held[at].block = malloc(held[at].bytes);
            CHECK(held[at].block != NULL);
            fill(held[at].block, held[at].bytes, held[at].bytes);
        }
    }
}

void *own_pages(size_t bytes) {
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    return pages;
}

struct start {
    void (*body)(size_t thread);
    size_t thread;
};

static void *run_start(void *argument) {
    struct start *start = argument;
    start->body(start->thread);
    return NULL;
}

void run_threads(size_t count, void (*body)(size_t thread)) {
    pthread_t threads[MAX_THREADS];
    struct start starts[MAX_THREADS];
    pthread_attr_t attributes;
    CHECK(count <= MAX_THREADS);
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, 256 * KIB) == 0);
    for (size_t i = 0; i < count; i++) {
        starts[i] = (struct start){body, i};
        CHECK(pthread_create(&threads[i], &attributes, run_start, &starts[i]) == 0);
    }
    for (size_t i = 0; i < count; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK(pthread_attr_destroy(&attributes) == 0);
}

void check_child(int child) {
    int status = 0;
    CHECK(child > 0);
    while (waitpid(child, &status, 0) != child) {
        CHECK(errno == EINTR);
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fprintf(stderr, "child %d: %s %d\n", child, WIFSIGNALED(status) ? "signal" : "status",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        _Exit(1);
    }
}

void deny_call(int number, int error) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof filter[0], .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        fprintf(stderr, "no seccomp filter may be installed here\n");
        _Exit(CANNOT);
    }
}

void work_in_thread(size_t thread) {
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

void fork_once(size_t i) {
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

size_t number_or(const char *argument, size_t otherwise) {
    return *argument == '\0' ? otherwise : strtoul(argument, NULL, 10);
}

int run_case(int argc, char **argv, const struct test_case *cases, size_t count) {
    static char out[4096];
    setvbuf(stdout, out, _IOFBF, sizeof out); /* or it would lie in the heap */
    for (size_t i = 0; argc >= 2 && i < count; i++) {
        if (strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run(argc > 2 ? argv[2] : "");
            if (accounts > 0) {
                say("accounts", accounts);
                say("accounts_excused", accounts_excused);
            }
            return 0;
        }
    }
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (size_t i = 0; i < count; i++) {
            puts(cases[i].name);
        }
        return 0;
    }
    fprintf(stderr, "no case is named %s\n", argc >= 2 ? argv[1] : "(none)");
    return 2;
}
