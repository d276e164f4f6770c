/* Programs that do not know the preloaded library: `cases NAME [ARGUMENT]`. */
#include "cases.h"
#include "../../c/helpers/strict_filter.h"

#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* A size that the compiler must not see through. Half of it and two, doubled, is two again. */
static volatile size_t most = SIZE_MAX;

static void use_a_little(const char *unused) {
    (void)unused;
    struct blocks blocks = allocate_blocks(100, 1000);
    free_blocks(&blocks, IN_ORDER);
}

static void fill_and_empty(size_t thread) {
    (void)thread;
    for (int round = 0; round < 3; round++) {
        struct blocks blocks = allocate_blocks(150, 100 * KIB);
        free_blocks(&blocks, REVERSED);
    }
}

static void use_threads(const char *unused) {
    (void)unused;
    run_threads(8, fill_and_empty);
}

/* 60 MiB up and down, and what stays resident of it. */
static void use_much(const char *unused) {
    (void)unused;
    size_t before = resident_bytes();
    struct blocks blocks = allocate_blocks(600, 100 * KIB);
    say("peak", grown_since(before));
    free_blocks(&blocks, REVERSED);
    say("kept", grown_since(before));
    say("break_kept", mallinfo2().arena);
}

static void set_by_mallopt(const char *setting) {
    static const struct {
        const char *name;
        int parameter, value;
    } settings[] = {{"trim_threshold", M_TRIM_THRESHOLD, 1 << 20},
                    {"top_pad", M_TOP_PAD, 1 << 20},
                    {"mmap_threshold", M_MMAP_THRESHOLD, 256 << 10}};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        if (strcmp(setting, settings[i].name) == 0) {
            CHECK(mallopt(settings[i].parameter, settings[i].value) == 1);
        }
    }
    use_much(NULL);
}

/* ---- fork ---- */

static _Atomic(int) stop;

static void allocate_until_stopped(size_t thread) {
    uint64_t random = thread + 1;
    while (!atomic_load(&stop)) {
        struct blocks blocks = allocate_blocks(50, 1000 + check_random(&random) % (120 * KIB));
        free_blocks(&blocks, RANDOM);
    }
}

static void *live_in_thread(void *unused) {
    (void)unused;
    struct blocks blocks = allocate_blocks(20, 60 * KIB);
    free_blocks(&blocks, IN_ORDER);
    return NULL;
}

static void live_as_child(void) {
    struct blocks blocks = allocate_blocks(20, 60 * KIB);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, live_in_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    free_blocks(&blocks, REVERSED);
}

static void fork_many(size_t forks) {
    for (size_t i = 0; i < forks; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            live_as_child();
            if (i % 4 == 0) {
                exit(0);
            }
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

static void fork_or_allocate(size_t thread) {
    if (thread == 0) {
        fork_many(200);
        atomic_store(&stop, 1);
    } else {
        allocate_until_stopped(thread);
    }
}

static void fork_under_load(const char *kernel) {
    if (strcmp(kernel, "without-wipe") == 0) {
        deny_wipe_on_fork();
        execl("/proc/self/exe", "cases", "forks", NULL);
        CHECK(!"executed");
    }
    run_threads(4, fork_or_allocate);
    fork_many(8);
}

/* ---- threads that come and go ---- */

#define LEFT_BLOCKS 64

static _Atomic(void *) left[LEFT_BLOCKS];

static pthread_barrier_t together;

/* Leaves its blocks to others, and frees theirs. Four at a time, so that there are arenas enough that one
 * comes to be trimmed. */
static void *live_briefly(void *argument) {
    uint64_t random = (uintptr_t)argument;
    pthread_barrier_wait(&together);
    for (int i = 0; i < 50; i++) {
        void *mine = malloc(100 + check_random(&random) % (60 * KIB));
        CHECK(mine != NULL);
        *(volatile char *)mine = 1;
        free(atomic_exchange(&left[check_random(&random) % LEFT_BLOCKS], mine));
    }
    return NULL;
}

static void churn_threads(const char *unused) {
    (void)unused;
    CHECK(pthread_barrier_init(&together, NULL, 4) == 0);
    size_t before = resident_bytes();
    for (uintptr_t i = 0; i < 1000; i++) {
        pthread_t threads[4];
        for (uintptr_t j = 0; j < 4; j++) {
            CHECK(pthread_create(&threads[j], NULL, live_briefly, (void *)(i * 4 + j + 1)) == 0);
        }
        for (size_t j = 0; j < 4; j++) {
            CHECK(pthread_join(threads[j], NULL) == 0);
        }
    }
    for (size_t i = 0; i < LEFT_BLOCKS; i++) {
        free(atomic_exchange(&left[i], NULL));
    }
    say("kept", grown_since(before));
    check_accounting();
}

/* ---- arenas of several heaps ---- */

static enum order order_named(const char *name) {
    return strcmp(name, "reversed") == 0 ? REVERSED : strcmp(name, "random") == 0 ? RANDOM : IN_ORDER;
}

static enum order tall_order;
static pthread_barrier_t filled, emptied, measured;

static void build_tall(void) {
    struct blocks blocks = allocate_blocks(3000, 100 * KIB);
    pthread_barrier_wait(&filled);
    pthread_barrier_wait(&measured);
    free_blocks(&blocks, tall_order);
    pthread_barrier_wait(&emptied);
    pthread_barrier_wait(&measured);
    /* In heaps that were given back, or shrunk. */
    fill_and_empty(0);
}

static void *run_tall(void *unused) {
    (void)unused;
    build_tall();
    return NULL;
}

static void use_barriers(unsigned threads) {
    CHECK(pthread_barrier_init(&filled, NULL, threads) == 0);
    CHECK(pthread_barrier_init(&emptied, NULL, threads) == 0);
    CHECK(pthread_barrier_init(&measured, NULL, threads) == 0);
}

static void use_tall_heap(const char *order) {
    tall_order = order_named(order);
    use_barriers(2);
    size_t before = resident_bytes();
    pthread_t tall;
    CHECK(pthread_create(&tall, NULL, run_tall, NULL) == 0);
    pthread_barrier_wait(&filled);
    say("peak", grown_since(before));
    check_accounting();
    CHECK(mallinfo2().arena >= 3000 * 100 * KIB);
    pthread_barrier_wait(&measured);
    pthread_barrier_wait(&emptied);
    say("kept", grown_since(before));
    check_accounting();
    pthread_barrier_wait(&measured);
    CHECK(pthread_join(tall, NULL) == 0);
    check_accounting();
}

/* Tops cross from heap to heap while other threads walk and trim. */
static void move_tops(size_t thread) {
    for (size_t round = 0; round < 4; round++) {
        struct blocks blocks = allocate_blocks(900 + thread * 50, 100 * KIB);
        free_blocks(&blocks, (enum order)((thread + round) % 3));
    }
}

static void use_tall_heaps(const char *unused) {
    (void)unused;
    run_threads(4, move_tops);
    check_accounting();
    run_threads(4, fill_and_empty);
    check_accounting();
}

extern void *__libc_malloc(size_t bytes); /* glibc's own, which a preloaded library does not see */

static pthread_barrier_t both_have_arenas;

/* Both threads have an arena before the library checks the older one; glibc lists the newest first. */
static void fill_and_empty_the_older(size_t thread) {
    for (size_t turn = 0; turn < 2; turn++) {
        if (turn == thread) {
            CHECK(__libc_malloc(100) != NULL);
        }
        pthread_barrier_wait(&both_have_arenas);
    }
    if (thread == 0) {
        fill_and_empty(thread);
    }
    pthread_barrier_wait(&both_have_arenas);
}

static void older_arena(const char *unused) {
    (void)unused;
    CHECK(pthread_barrier_init(&both_have_arenas, NULL, 2) == 0);
    run_threads(2, fill_and_empty_the_older);
    check_accounting();
}

/* ---- contents ---- */

static bool is_zero(const unsigned char *block, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (block[i] != 0) {
            return false;
        }
    }
    return true;
}

static void calloc_after_trims(size_t thread) {
    for (size_t round = 0; round < 6; round++) {
        struct blocks dirty = allocate_blocks(200, 100 * KIB);
        for (size_t i = 0; i < dirty.count; i++) {
            memset(dirty.rows[i], 0xDB, dirty.bytes);
            fill(dirty.rows[i], dirty.bytes, (unsigned char)i);
        }
        free_blocks(&dirty, (enum order)((thread + round) % 3));
        void *clean[64];
        for (size_t i = 0; i < 64; i++) {
            clean[i] = calloc(1 + i % 3, 17 * KIB + i * 512);
            CHECK(clean[i] != NULL && is_zero(clean[i], (1 + i % 3) * (17 * KIB + i * 512)));
        }
        for (size_t i = 0; i < 64; i++) {
            free(clean[i]);
        }
    }
}

static void calloc_is_zero(const char *unused) {
    (void)unused;
    calloc_after_trims(0);
    run_threads(4, calloc_after_trims);
}

static void realloc_blocks(size_t thread) {
    static const size_t sizes[] = {1,       24,      1000,      5 * KIB,  100 * KIB, 130 * KIB,  1 * MIB,
                                   5 * MIB, 2 * MIB, 127 * KIB, 64 * KIB, 40,        3000 * KIB, 10};
    for (int round = 0; round < 30; round++) {
        size_t bytes = 100;
        unsigned char mark = (unsigned char)(thread + 1);
        unsigned char *block = realloc(NULL, bytes);
        CHECK(block != NULL);
        fill(block, bytes, mark);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            size_t kept = bytes < sizes[i] ? bytes : sizes[i];
            block = i % 2 == 0 ? realloc(block, sizes[i]) : reallocarray(block, sizes[i], 1);
            CHECK(block != NULL && malloc_usable_size(block) >= sizes[i]);
            check_filled(block, kept, mark);
            bytes = sizes[i];
            fill(block, bytes, ++mark);
        }
        free(block);
    }
    void *block = malloc(100);
    CHECK(block != NULL);
    fill(block, 100, 9);
    errno = 0;
    CHECK(reallocarray(block, most / 2 + 2, 2) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(reallocarray(NULL, most / 2 + 2, 2) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(realloc(block, most - 100) == NULL && errno == ENOMEM);
    check_filled(block, 100, 9);
    CHECK(realloc(block, 0) == NULL); /* glibc frees it */
}

static void realloc_while_trimming(size_t thread) {
    realloc_blocks(thread);
    fill_and_empty(thread);
    realloc_blocks(thread);
}

static void realloc_everywhere(const char *unused) {
    (void)unused;
    realloc_blocks(0);
    run_threads(4, realloc_while_trimming);
}

static void check_aligned(unsigned char *block, size_t alignment, size_t bytes) {
    CHECK(block != NULL && (uintptr_t)block % alignment == 0);
    CHECK(malloc_usable_size(block) >= bytes);
    memset(block, 0x3C, malloc_usable_size(block));
    block = realloc(block, bytes + 50 * KIB);
    CHECK(block != NULL);
    for (size_t i = 0; i < bytes; i++) {
        CHECK(block[i] == 0x3C);
    }
    free(block);
}

static void align_blocks(size_t thread) {
    (void)thread;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t alignment = 16; alignment <= 2 * MIB; alignment *= 2) {
        for (size_t bytes = 1; bytes <= 300 * KIB; bytes = bytes * 5 + 3) {
            void *block = NULL;
            CHECK(posix_memalign(&block, alignment, bytes) == 0);
            check_aligned(block, alignment, bytes);
            check_aligned(aligned_alloc(alignment, bytes), alignment, bytes);
            check_aligned(memalign(alignment, bytes), alignment, bytes);
        }
    }
    for (size_t bytes = 1; bytes <= 300 * KIB; bytes = bytes * 5 + 3) {
        check_aligned(valloc(bytes), page, bytes);
        check_aligned(pvalloc(bytes), page, (bytes + page - 1) / page * page);
    }
    void *untouched = &page;
    CHECK(posix_memalign(&untouched, 3, 100) == EINVAL);
    CHECK(posix_memalign(&untouched, 0, 100) == EINVAL);
    CHECK(posix_memalign(&untouched, 24, 100) == EINVAL);
    CHECK(posix_memalign(&untouched, 64, most - 1000) == ENOMEM);
    CHECK(untouched == &page);
    errno = 0;
    CHECK(memalign(64, most - 1000) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(aligned_alloc(64, most - 1000) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(valloc(most - 1000) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(pvalloc(most - 1000) == NULL && errno == ENOMEM);
    CHECK(malloc_usable_size(NULL) == 0);
}

static void align_everywhere(const char *unused) {
    (void)unused;
    align_blocks(0);
    run_threads(4, align_blocks);
}

/* Whether a small free merges, or a large one unmaps, or the library trims: errno is the program's. */
static void keep_errno(size_t thread) {
    struct blocks blocks = allocate_blocks(400, 100 * KIB);
    void *large = malloc(20 * MIB);
    CHECK(large != NULL);
    errno = 4321;
    for (size_t i = blocks.count; i > 0; i--) {
        free(blocks.rows[i - 1]);
        CHECK(errno == 4321);
    }
    free(large);
    CHECK(errno == 4321);
    free(NULL);
    void *small = malloc(100 + thread);
    CHECK(small != NULL && errno == 4321);
    free(small);
    CHECK(errno == 4321);
    CHECK(munmap(blocks.rows, blocks.count * sizeof(void *)) == 0);
}

static void free_keeps_errno(const char *unused) {
    (void)unused;
    keep_errno(0);
    run_threads(4, keep_errno);
}

/* ---- out of memory ---- */

static void exhaust(size_t thread) {
    (void)thread;
    void *chain = NULL;
    size_t count = 0;
    for (;;) {
        errno = 0;
        void **block = malloc(100 * KIB);
        if (block == NULL) {
            break;
        }
        *block = chain;
        chain = block;
        count++;
    }
    CHECK(errno == ENOMEM);
    CHECK(count < 4000);
    errno = 0;
    CHECK(calloc(500, MIB) == NULL && errno == ENOMEM);
    while (chain != NULL) {
        void *next = *(void **)chain;
        free(chain);
        chain = next;
    }
}

static void ask_too_much(void) {
    void *block = malloc(100);
    CHECK(block != NULL);
    for (size_t less = 0; less < 5 * KIB; less += 1021) {
        errno = 0;
        CHECK(malloc(most - less) == NULL && errno == ENOMEM);
        errno = 0;
        CHECK(calloc(1, most - less) == NULL && errno == ENOMEM);
        errno = 0;
        CHECK(realloc(block, most - less) == NULL && errno == ENOMEM);
    }
    errno = 0;
    CHECK(calloc(most, 2) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(calloc(2, most) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(calloc(most / 2 + 2, 2) == NULL && errno == ENOMEM); /* the product is 2 */
    errno = 0;
    CHECK(malloc(most / 2) == NULL && errno == ENOMEM);
    free(block);
}

static void run_out(const char *unused) {
    (void)unused;
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
    FILE *stream = fopen("/proc/self/statm", "re");
    size_t pages;
    CHECK(stream != NULL && fscanf(stream, "%zu", &pages) == 1 && fclose(stream) == 0);
    /* Room for the stacks, the heaps that threads reserve, and something to allocate. */
    limit.rlim_cur = pages * (size_t)sysconf(_SC_PAGESIZE) + 300 * MIB;
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    for (int round = 0; round < 3; round++) {
        exhaust(0);
    }
    run_threads(2, exhaust);
    limit.rlim_cur = limit.rlim_max;
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    run_threads(4, fill_and_empty);
    check_accounting();
}

static void *return_argument(void *argument) {
    return argument;
}

/* What glibc has in use and free fills a limit; once all is freed, a thread or a library has room. */
static void make_room(const char *way) {
    struct rlimit limit = {64 * MIB, 64 * MIB};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    void **first = NULL, **last = NULL;
    for (void **block; (block = malloc(1000)) != NULL; last = block) {
        *block = NULL;
        *(last == NULL ? (void **)&first : last) = block;
    }
    while (first != NULL) {
        void **block = first;
        first = *block;
        free(block);
    }
    if (strcmp(way, "thread") == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, return_argument, NULL) == 0 && pthread_join(thread, NULL) == 0);
    } else {
        void *library = dlopen("libm.so.6", RTLD_NOW);
        CHECK(library != NULL && dlclose(library) == 0);
    }
}

static void ask_too_much_thread(size_t thread) {
    ask_too_much();
    fill_and_empty(thread);
}

static void ask_for_everything(const char *unused) {
    (void)unused;
    ask_too_much();
    run_threads(4, ask_too_much_thread);
}

/* ---- what the kernel refuses ---- */

static void lock_all(const char *unused) {
    (void)unused;
    if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) {
        fprintf(stderr, "memory may not be locked here\n");
        _Exit(CANNOT);
    }
    run_threads(8, fill_and_empty);
    check_accounting();
}

/* By a filter that is there before the program starts, as in a container. */
static void deny(const char *by) {
    if (strcmp(by, "inherited") != 0) {
        deny_process_madvise();
        execl("/proc/self/exe", "cases", "deny", "inherited", NULL);
        CHECK(!"executed");
    }
    run_threads(8, fill_and_empty);
    check_accounting();
}

/* ---- a filter ---- */

/* As a server with privilege separation: a child gives up nearly all system calls, and goes on. */
static void filtered(const char *how) {
    run_threads(8, fill_and_empty);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        add_strict_filter(how);
        for (int round = 0; round < 20; round++) {
            struct blocks blocks = allocate_blocks(600, 100 * KIB);
            free_blocks(&blocks, REVERSED);
        }
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    run_threads(8, fill_and_empty);
}

/* ---- the dynamic mmap threshold ---- */

/* A block of so many bytes, freed, then one more: is that one mapped, too? */
static void raise_mmap_threshold(const char *mebibytes) {
    size_t bytes = strtoul(mebibytes, NULL, 10) * MIB;
    void *first = malloc(bytes);
    CHECK(first != NULL);
    say("first_mapped", mallinfo2().hblks);
    free(first);
    CHECK(mallinfo2().hblks == 0);
    void *second = malloc(bytes);
    CHECK(second != NULL);
    say("second_mapped", mallinfo2().hblks);
    free(second);
}

/* ---- what stays, and what a purge costs ---- */

#define IDLE_THREADS 16
#define IDLE_BLOCKS  192 /* of 100 KiB: 300 MiB in all */

static enum order idle_order;
static struct blocks idle_blocks[IDLE_THREADS];
static size_t idle_shift; /* whose blocks a thread frees: its own, or another's */

static void fall_idle(size_t thread) {
    idle_blocks[thread] = allocate_blocks(IDLE_BLOCKS, 100 * KIB);
    pthread_barrier_wait(&filled);
    pthread_barrier_wait(&filled);
    free_blocks(&idle_blocks[(thread + idle_shift) % IDLE_THREADS], idle_order);
    pthread_barrier_wait(&emptied);
    pthread_barrier_wait(&measured);
}

static pthread_t idle[IDLE_THREADS];

static void *run_idle(void *thread) {
    fall_idle((size_t)(uintptr_t)thread);
    return NULL;
}

static void retain(const char *order) {
    idle_order = order_named(order);
    idle_shift = strcmp(order, "others") == 0 ? 1 : 0;
    use_barriers(IDLE_THREADS + 1);
    size_t before = resident_bytes();
    for (uintptr_t i = 0; i < IDLE_THREADS; i++) {
        CHECK(pthread_create(&idle[i], NULL, run_idle, (void *)i) == 0);
    }
    pthread_barrier_wait(&filled);
    say("peak", grown_since(before));
    pthread_barrier_wait(&filled);
    pthread_barrier_wait(&emptied);
    say("kept", grown_since(before));
    check_accounting();
    pthread_barrier_wait(&measured);
    for (size_t i = 0; i < IDLE_THREADS; i++) {
        CHECK(pthread_join(idle[i], NULL) == 0);
    }
}

/*
 * Blocks of many arenas, each last block of which holds back a large free run, freed one by one by one
 * thread: no arena's top is seen to grow twice.
 */
static struct blocks pinned[IDLE_THREADS];

static void build_pinned(size_t thread) {
    struct blocks blocks = allocate_blocks(IDLE_BLOCKS, 100 * KIB);
    void *pin = malloc(2000);
    CHECK(pin != NULL);
    free_blocks(&blocks, IN_ORDER);
    pinned[thread].rows = pin;
    pthread_barrier_wait(&filled);
}

static void release_pinned(const char *unused) {
    (void)unused;
    use_barriers(IDLE_THREADS);
    size_t before = resident_bytes();
    run_threads(IDLE_THREADS, build_pinned);
    say("peak", grown_since(before));
    for (size_t i = 0; i < IDLE_THREADS; i++) {
        free(pinned[i].rows);
    }
    say("kept", grown_since(before));
}

static void run_steadily(size_t thread) {
    (void)thread;
    for (int round = 0; round < 15; round++) {
        struct blocks blocks = allocate_blocks(200, 100 * KIB);
        free_blocks(&blocks, REVERSED);
    }
}

static void stay_steady(const char *unused) {
    (void)unused;
    run_threads(8, run_steadily);
}

static void rise_and_fall(size_t thread) {
    (void)thread;
    for (int round = 0; round < 20; round++) {
        struct blocks blocks = allocate_blocks(40, 100 * KIB);
        pthread_barrier_wait(&filled);
        free_blocks(&blocks, REVERSED);
        pthread_barrier_wait(&emptied);
    }
}

/* Eight tops that are large together: one purge for all. */
static void rise_and_fall_together(const char *unused) {
    (void)unused;
    use_barriers(8);
    run_threads(8, rise_and_fall);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(const char *argument);
    } cases[] = {
        {"little", use_a_little},
        {"threads", use_threads},
        {"much", use_much},
        {"mallopt", set_by_mallopt},
        {"forks", fork_under_load},
        {"churn", churn_threads},

        {"tall", use_tall_heap},
        {"tall-contended", use_tall_heaps},
        {"older-arena", older_arena},
        {"calloc", calloc_is_zero},
        {"realloc", realloc_everywhere},
        {"memalign", align_everywhere},
        {"errno", free_keeps_errno},
        {"oom", run_out},
        {"room", make_room},
        {"too-much", ask_for_everything},
        {"mlockall", lock_all},
        {"deny", deny},
        {"filtered", filtered},
        {"mmap-threshold", raise_mmap_threshold},
        {"retain", retain},
        {"pinned", release_pinned},
        {"steady", stay_steady},
        {"together", rise_and_fall_together},
    };
    static char out[4096];
    setvbuf(stdout, out, _IOFBF, sizeof out); /* or it would lie on top of the heap */
    CHECK(argc >= 2);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run(argc > 2 ? argv[2] : "");
            return 0;
        }
    }
    fprintf(stderr, "no case is named %s\n", argv[1]);
    return 2;
}
