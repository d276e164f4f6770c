/*
 * Each case misuses the allocator once, prints the pointer, and makes the cache flush the block to the heap.
 * With misuse=warn the program continues, and the heap must be intact.
 */
#include "api.h"
#include "names.h"

#include <errno.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Block sizes: of a cache, of a slab, of a run of pages, and large. */
static const struct {
    const char *name;
    size_t bytes;
} sizes[] = {{"small", 48}, {"middle", 3000}, {"run", 60000}, {"large", 5 * MIB}};

static void announce(const void *pointer) {
    printf("pointer %#llx\n", (unsigned long long)(uintptr_t)pointer);
    fflush(stdout);
}

static size_t size_named(const char *name) {
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (strcmp(name, sizes[i].name) == 0) {
            return sizes[i].bytes;
        }
    }
    CHECK(false);
    return 0;
}

/* After the misuse: nothing may be owned twice, and all of it must work. */
static void live_on(void) {
    enum { BLOCKS = 3000 };
    calm_trim(0);
    unsigned char **blocks = own_pages(BLOCKS * sizeof *blocks);
    for (size_t round = 0; round < 2; round++) {
        for (size_t i = 0; i < BLOCKS; i++) {
            size_t bytes =
                i % 4 == 0 ? 48 : (i % 4 == 1 ? 3000 : (i % 4 == 2 ? 200 : (i % 64 == 3 ? 60000 : 16)));
            blocks[i] = malloc(bytes);
            CHECK(blocks[i] != NULL);
            fill(blocks[i], 16, i);
        }
        for (size_t i = 0; i < BLOCKS; i++) {
            CHECK(is_filled(blocks[i], 16, i));
        }
        for (size_t i = 0; i < BLOCKS; i++) {
            free(blocks[i]);
        }
    }
    calm_trim(0);
    stats_now();
    say("lived", 1);
}

static void *new_block(size_t bytes) {
    void *block = malloc(bytes);
    CHECK(block != NULL);
    memset(block, 1, bytes);
    return block;
}

static void double_free(const char *size) {
    void *block = new_block(size_named(size)), *again = hidden(block);
    announce(again);
    free(block);
    free(again);
}

/* And nothing more: the last to see it is the library's own end. */
static void double_free_at_exit(const char *size) {
    double_free(size);
    exit(0);
}

/* Later calls get blocks of their own. */
static void ask_for_three(size_t bytes) {
    void *first = malloc(bytes), *second = malloc(bytes), *third = malloc(bytes);
    CHECK(first != NULL && second != NULL && third != NULL);
    CHECK(first != second && second != third && first != third);
    CHECK(((uintptr_t)first | (uintptr_t)second | (uintptr_t)third) % 16 == 0);
    say("apart", 1);
}

static void double_free_now(const char *size) {
    double_free(size);
    ask_for_three(size_named(size));
}

static void unaligned(const char *size) {
    unsigned char *block = new_block(size_named(size));
    unsigned char *inside = hidden(block + 8);
    announce(inside);
    free(inside);
    ask_for_three(size_named(size));
}

/* With others of its size between the two. */
static void double_free_later(const char *size) {
    void *others[20];
    for (size_t i = 0; i < 20; i++) {
        others[i] = new_block(size_named(size));
    }
    void *again = hidden(others[7]);
    announce(again);
    for (size_t i = 0; i < 20; i++) {
        free(others[i]);
    }
    free(again);
}

/* Once all of its slab or run has gone back to the heap. */
static void double_free_after_trim(const char *size) {
    void *block = new_block(size_named(size)), *again = hidden(block);
    announce(again);
    free(block);
    calm_trim(0);
    free(again);
}

static void *to_free_elsewhere;
static pthread_barrier_t meet;

static void *free_when_met(void *unused) {
    pthread_barrier_wait(&meet);
    free(to_free_elsewhere);
    return unused;
}

/* The thread is there before: what its start allocates must not take the block's place. */
static void double_free_elsewhere(const char *size) {
    pthread_t thread;
    CHECK(pthread_barrier_init(&meet, NULL, 2) == 0);
    CHECK(pthread_create(&thread, NULL, free_when_met, NULL) == 0);
    void *block = new_block(size_named(size));
    to_free_elsewhere = hidden(block);
    announce(to_free_elsewhere);
    free(block);
    pthread_barrier_wait(&meet);
    CHECK(pthread_join(thread, NULL) == 0);
}

/* The address of a block plus something. */
static void interior(const char *size) {
    unsigned char *block = new_block(size_named(size));
    unsigned char *inside = hidden(block + 16);
    announce(inside);
    free(inside);
}

static void odd(const char *size) {
    unsigned char *block = new_block(size_named(size));
    unsigned char *inside = hidden(block + 1);
    announce(inside);
    free(inside);
}

static void interior_page(const char *size) {
    unsigned char *block = new_block(size_named(size));
    unsigned char *inside = hidden(block + 4096 * (size_named(size) / 8192));
    announce(inside);
    free(inside);
}

static void interior_realloc(const char *size) {
    unsigned char *block = new_block(size_named(size));
    unsigned char *inside = hidden(block + 16);
    announce(inside);
    errno = 0;
    void *moved = realloc(inside, 100);
    CHECK(moved == NULL || moved != (void *)inside);
}

static void double_realloc(const char *size) {
    void *block = new_block(size_named(size)), *again = hidden(block);
    announce(again);
    free(block);
    calm_trim(0);
    void *moved = realloc(again, 2 * size_named(size));
    CHECK(moved == NULL || moved != again);
}

static char of_the_program[256];

static void foreign(const char *kind) {
    _Alignas(64) char local[256];
    char *pointer = NULL;
    if (strcmp(kind, "stack") == 0) {
        pointer = local + 64;
    } else if (strcmp(kind, "data") == 0) {
        pointer = of_the_program + 64;
    } else if (strcmp(kind, "code") == 0) {
        pointer = (char *)(uintptr_t)foreign;
    } else if (strcmp(kind, "mapped") == 0) {
        pointer = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK((void *)pointer != MAP_FAILED);
    } else if (strcmp(kind, "low") == 0) {
        pointer = (char *)16;
    } else if (strcmp(kind, "kernel") == 0) {
        pointer = (char *)0xFFFFFFFFFFFFF000U;
    } else if (strcmp(kind, "odd") == 0) {
        pointer = (char *)0x123456789ABCDEFU;
    }
    CHECK(pointer != NULL);
    pointer = hidden(pointer);
    announce(pointer);
    free(pointer);
}

static void foreign_realloc(const char *kind) {
    _Alignas(64) char local[256];
    char *pointer = hidden(strcmp(kind, "stack") == 0 ? local + 64 : of_the_program + 64);
    announce(pointer);
    void *moved = realloc(pointer, 1000);
    CHECK(moved == NULL || moved != (void *)pointer);
}

/* Not misuse that is named, but nothing of the heap's own may lie where a stray write hits it. */
static void scribble(const char *size) {
    enum { BLOCKS = 64 };
    unsigned char *blocks[BLOCKS];
    size_t bytes = size_named(size);
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = new_block(bytes);
    }
    for (size_t i = 0; i < BLOCKS; i += 2) {
        free(blocks[i]);
        if (bytes < 4096) {
            memset(hidden(blocks[i]), 0xFF, bytes);
        }
    }
    /* Across the end of each, into what is free beside it. */
    for (size_t i = 1; i < BLOCKS && bytes < 4096; i += 2) {
        size_t usable = malloc_usable_size(blocks[i]);
        memset(hidden(blocks[i]), 0xFF, usable);
    }
    for (size_t i = 1; i < BLOCKS; i += 2) {
        free(blocks[i]);
    }
}

/* A write into a neighbour is not detected, and damages no metadata. */
static void overrun(const char *size) {
    enum { BLOCKS = 64 };
    unsigned char *blocks[BLOCKS];
    size_t bytes = size_named(size);
    CHECK(bytes < 4096);
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = new_block(bytes);
    }
    for (size_t i = 0; i + 8 < BLOCKS; i++) {
        memset(hidden(blocks[i]), 0xFF, malloc_usable_size(blocks[i]) + 64);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        free(blocks[i]);
    }
}

static _Atomic(bool) offender_is_done;

static void *innocent(void *unused) {
    while (!offender_is_done) {
        void *blocks[64];
        for (size_t i = 0; i < 64; i++) {
            blocks[i] = new_block(40000 + i * 100);
        }
        for (size_t i = 0; i < 64; i++) {
            free(blocks[i]);
        }
    }
    return unused;
}

/* Of several threads, the first one frees wrongly, again and again. */
static void among_innocents(const char *size) {
    enum { INNOCENTS = 4, TIMES = 500 };
    pthread_t threads[INNOCENTS];
    for (size_t i = 0; i < INNOCENTS; i++) {
        CHECK(pthread_create(&threads[i], NULL, innocent, NULL) == 0);
    }
    say("offender", syscall(SYS_gettid));
    for (size_t i = 0; i < TIMES; i++) {
        void *block = new_block(size_named(size));
        free(block);
        free(hidden(block));
    }
    offender_is_done = true;
    for (size_t i = 0; i < INNOCENTS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

/* Ends here: hardly a system call is left. */
static void under_a_strict_filter(const char *size) {
    void *block = new_block(size_named(size));
    free(block);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
    free(hidden(block));
    static const char message[] = "went on\n";
    ssize_t written = write(STDOUT_FILENO, message, sizeof message - 1);
    syscall(SYS_exit, written > 0 ? 0 : 1);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"double-free", double_free},
        {"double-free-at-exit", double_free_at_exit},
        {"double-free-now", double_free_now},
        {"unaligned", unaligned},
        {"double-free-later", double_free_later},
        {"double-free-after-trim", double_free_after_trim},
        {"double-free-elsewhere", double_free_elsewhere},
        {"interior", interior},
        {"odd", odd},
        {"interior-page", interior_page},
        {"interior-realloc", interior_realloc},
        {"double-realloc", double_realloc},
        {"foreign", foreign},
        {"foreign-realloc", foreign_realloc},
        {"scribble", scribble},
        {"overrun", overrun},
        {"among-innocents", among_innocents},
        {"strict-filter", under_a_strict_filter},
    };
    int status = run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
    live_on();
    return status;
}
