/*
 * Blocks that glibc maps individually, and where they start: `placed NAME`. Builds on every supported glibc.
 */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../c/helpers/check.h"

#define PAGE   4096UL
#define LINE   64UL
#define LINES  64UL
#define KIB    (1UL << 10)
#define MIB    (1UL << 20)
#define MAPPED 256 /* as many blocks at once */

/* A size that the compiler must not see through. */
static volatile size_t too_much = SIZE_MAX;

static void say(const char *name, size_t value) {
    printf("%s %zu\n", name, value);
}

/* mallinfo2 is not in glibc 2.31; its ints are enough here. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static size_t mapped_bytes(void) {
    return (size_t)mallinfo().hblkhd;
}

static size_t mapped_blocks(void) {
    return (size_t)mallinfo().hblks;
}

static size_t start_of(const void *block) {
    return (uintptr_t)block % PAGE;
}

/* Another byte for each place, so that what was moved by a line does not look right. */
static unsigned char byte_at(size_t i, unsigned char mark) {
    return (unsigned char)(mark + i / 16 * 7);
}

static void fill(unsigned char *block, size_t from, size_t bytes, unsigned char mark) {
    for (size_t i = from; i < bytes; i++) {
        block[i] = byte_at(i, mark);
    }
}

static void check_filled(const unsigned char *block, size_t bytes, unsigned char mark) {
    for (size_t i = 0; i < bytes; i++) {
        CHECK(block[i] == byte_at(i, mark));
    }
}

static void check_zero(const unsigned char *block, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        CHECK(block[i] == 0);
    }
}

/* Whether any page from here on is mapped, as the kernel says. */
static int is_mapped(const void *block) {
    unsigned char resident;
    return mincore((char *)block - start_of(block), 1, &resident) == 0 || errno != ENOMEM;
}

/* Of the address space, as the kernel says: realloc of glibc 2.43 counts 16 bytes too many for a block. */
static size_t all_pages(void) {
    char text[128] = "";
    int descriptor = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    CHECK(descriptor >= 0 && read(descriptor, text, sizeof text - 1) > 0 && close(descriptor) == 0);
    return strtoul(text, NULL, 10);
}

/* ---- where blocks begin ---- */

static void say_starts(void *const *blocks, size_t count) {
    size_t blocks_at[LINES] = {0};
    size_t distinct = 0, most = 0, farthest = 0;
    for (size_t i = 0; i < count; i++) {
        CHECK(start_of(blocks[i]) % LINE == 16);
        size_t line = start_of(blocks[i]) / LINE;
        distinct += blocks_at[line]++ == 0;
        most = blocks_at[line] > most ? blocks_at[line] : most;
        farthest = line > farthest ? line : farthest;
    }
    say("distinct", distinct);
    say("most_of_one", most);
    say("farthest", farthest);
    size_t nearest = PAGE; /* two blocks that were allocated one after the other */
    for (size_t i = 1; i < count; i++) {
        size_t apart = (start_of(blocks[i]) - start_of(blocks[i - 1])) % PAGE;
        apart = apart < PAGE - apart ? apart : PAGE - apart;
        nearest = apart < nearest ? apart : nearest;
    }
    say("nearest_neighbours", nearest);
}

/* So many blocks, in one of three ways. All of a size, of so many bytes beside whole pages. */
static void allocate_alike(const char *way, size_t count, size_t bytes) {
    void *blocks[MAPPED];
    CHECK(count <= MAPPED);
    free(malloc(1000)); /* the arena is there */
    size_t pages = all_pages(), mapped = mapped_bytes();
    for (size_t i = 0; i < count; i++) {
        if (strcmp(way, "malloc") == 0) {
            blocks[i] = malloc(bytes);
        } else if (strcmp(way, "calloc") == 0) {
            blocks[i] = calloc(bytes / 8, 8);
        } else if (strcmp(way, "grown") == 0) {
            blocks[i] = malloc(1000);
            CHECK(blocks[i] != NULL);
            fill(blocks[i], 0, 1000, (unsigned char)i);
            blocks[i] = realloc(blocks[i], bytes);
        } else {
            CHECK(posix_memalign(&blocks[i], 16, bytes) == 0);
        }
        CHECK(blocks[i] != NULL && malloc_usable_size(blocks[i]) >= bytes);
        if (strcmp(way, "grown") == 0) {
            check_filled(blocks[i], 1000, (unsigned char)i);
        }
        if (strcmp(way, "calloc") == 0) {
            check_zero(blocks[i], malloc_usable_size(blocks[i]));
        }
        memset(blocks[i], 0xA5, malloc_usable_size(blocks[i]));
    }
    say("mapped", mapped_blocks());
    say("pages", (mapped_bytes() - mapped) / PAGE);
    say_starts(blocks, count);
    for (size_t i = 0; i < count; i++) {
        free(blocks[i]);
        CHECK(!is_mapped(blocks[i]));
    }
    CHECK(mapped_blocks() == 0 && all_pages() == pages);
}

static void malloc_alike(void) {
    allocate_alike("malloc", 2 * LINES, MIB);
}

static void calloc_alike(void) {
    allocate_alike("calloc", 2 * LINES, MIB);
}

static void grow_alike(void) {
    allocate_alike("grown", 2 * LINES, MIB);
}

/* 16 bytes are not what malloc's own blocks promise beyond. */
static void align_alike(void) {
    allocate_alike("aligned", 2 * LINES, MIB);
}

static void first_of_all(void) {
    void *block = malloc(MIB);
    CHECK(block != NULL);
    say("start", start_of(block));
    free(block);
}

/* Room for eight lines, at less than 64 pages: glibc's header takes 16 bytes of the rest, or 24. */
static void little_room(void) {
    allocate_alike("malloc", LINES, 200 * KIB + PAGE - 7 * LINE - 32);
}

/* For a block as large a page more is a 64th. */
static void large_without_room(void) {
    allocate_alike("malloc", LINES, 256 * KIB + PAGE - 32);
}

static void no_room(void) {
    allocate_alike("malloc", LINES, 200 * KIB + PAGE - 32);
}

/* Four threads at once: two lines get one block more or less than others, not many. */
static void *shared[4 * LINES];

static void *allocate_in_thread(void *first) {
    void **blocks = first;
    free(malloc(1)); /* makes the thread its arena, which may else hold the first block */
    for (size_t i = 0; i < LINES; i++) {
        blocks[i] = malloc(MIB);
        CHECK(blocks[i] != NULL);
    }
    return NULL;
}

static void in_threads(void) {
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) {
        CHECK(pthread_create(&threads[i], NULL, allocate_in_thread, &shared[i * LINES]) == 0);
    }
    for (size_t i = 0; i < 4; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    say_starts(shared, 4 * LINES);
    for (size_t i = 0; i < 4 * LINES; i++) {
        free(shared[i]);
    }
    CHECK(mapped_blocks() == 0);
}

/* Every size of some pages, one after the other: how many pages glibc has mapped for them in all. */
static void count_pages(size_t from, size_t to) {
    size_t pages = 0;
    for (size_t bytes = from; bytes < to; bytes += 8) {
        size_t before = mapped_bytes();
        void *block = malloc(bytes);
        CHECK(block != NULL && malloc_usable_size(block) >= bytes);
        memset((char *)block + malloc_usable_size(block) - 1, 1, 1);
        pages += (mapped_bytes() - before) / PAGE;
        free(block);
        CHECK(mapped_bytes() == before);
    }
    say("pages", pages);
}

static void pages_of_smaller(void) {
    count_pages(200 * KIB, 200 * KIB + 2 * PAGE);
}

/* Of whole pages: the last one has all the room there is. */
static void pages_of_whole(void) {
    size_t pages = 0;
    for (size_t bytes = 256 * KIB; bytes < 512 * KIB; bytes += PAGE) {
        void *block = malloc(bytes);
        CHECK(block != NULL);
        pages += mapped_bytes() / PAGE;
        free(block);
    }
    say("pages", pages);
}

static void pages_of_larger(void) {
    count_pages(256 * KIB, 256 * KIB + 2 * PAGE);
}

/* Blocks whose chunks are of exactly the threshold, the smallest that are mapped, among others that an
 * arena has. */
static void place_among_others(size_t threshold) {
    void *blocks[2 * LINES];
    for (size_t i = 0; i < 2 * LINES; i++) {
        void *other = i % 2 == 0 ? malloc(threshold / 4 * 3) : memalign(64, threshold / 4 * 3);
        CHECK(other != NULL && mapped_blocks() == i);
        do { /* until there is no more room beside it */
            blocks[i] = malloc(threshold - 23);
            CHECK(blocks[i] != NULL);
        } while (mapped_blocks() == i);
        CHECK(mapped_blocks() == i + 1);
    }
    say_starts(blocks, 2 * LINES);
    for (size_t i = 0; i < 2 * LINES; i++) {
        free(blocks[i]);
    }
    CHECK(mapped_blocks() == 0);
}

static void among_others(void) {
    place_among_others(128 * KIB);
}

static void among_others_when_lowered(void) {
    CHECK(mallopt(M_MMAP_THRESHOLD, 64 << 10) == 1);
    place_among_others(64 * KIB);
}

static void among_others_when_refused(void) {
    if (mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1) { /* older ones refuse, and nothing has changed */
        CHECK(mallopt(M_MMAP_THRESHOLD, 128 << 10) == 1);
    }
    place_among_others(128 * KIB);
}

/* Large enough to be mapped, but an arena has room: blocks that follow each other directly, and begin where
 * mapped ones do if a page's room more is asked for. */
static void in_arena(void) {
    enum { BLOCKS = 16 };
    const size_t bytes = 256 * KIB + PAGE - (PAGE - LINE) - 8;
    unsigned char *blocks[BLOCKS];
    CHECK(mallopt(M_MMAP_THRESHOLD, 8 << 20) == 1 && mallopt(M_TRIM_THRESHOLD, 64 << 20) == 1);
    void *run = malloc(6 * MIB);
    CHECK(run != NULL && mapped_blocks() == 0);
    free(run);
    char *end = malloc(64 * KIB - 8);
    CHECK(end != NULL);
    end += 64 * KIB;
    CHECK(malloc(PAGE - start_of(end) + 16 - 8 + 64 * KIB) == end);
    CHECK(mallopt(M_MMAP_THRESHOLD, 128 << 10) == 1);
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = calloc(1, bytes);
        CHECK(blocks[i] != NULL && mapped_blocks() == 0);
        say(i == 0 ? "first" : "last", start_of(blocks[i]));
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        CHECK(malloc_usable_size(blocks[i]) >= bytes);
        fill(blocks[i], 0, malloc_usable_size(blocks[i]), (unsigned char)i);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        check_filled(blocks[i], malloc_usable_size(blocks[i]), (unsigned char)i);
        free(blocks[i]);
    }
}

/* Once a block was freed, glibc maps no more of its size, to the last byte of its pages. */
static void after_a_free(void) {
    for (size_t bytes = MIB; bytes <= 20 * MIB; bytes += MIB) {
        void *block = malloc(bytes);
        CHECK(block != NULL && mapped_blocks() == 1);
        free(block);
        block = malloc(bytes + PAGE - 96);
        CHECK(block != NULL && mapped_blocks() == 0);
        free(block);
    }
}

/* ---- realloc ---- */

static void resize(void) {
    static const size_t sizes[] = {MIB,     3 * MIB, 3 * MIB + 1, 200 * KIB, 5 * MIB,   40,
                                   1000000, 1,       64 * KIB,    9 * MIB,   300 * KIB, 24};
    free(malloc(1));
    size_t pages = all_pages();
    for (size_t round = 0; round < LINES; round++) {
        size_t bytes = 512 * KIB;
        unsigned char mark = (unsigned char)round;
        unsigned char *block = round % 2 == 0 ? malloc(bytes) : calloc(1, bytes);
        CHECK(block != NULL);
        size_t start = start_of(block);
        fill(block, 0, bytes, mark);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            size_t kept = bytes < sizes[i] ? bytes : sizes[i];
            unsigned char *old = block;
            block = i % 3 == 0 ? reallocarray(block, sizes[i], 1) : realloc(block, sizes[i]);
            CHECK(block != NULL && start_of(block) == start && malloc_usable_size(block) >= sizes[i]);
            CHECK(block == old || !is_mapped(old));
            CHECK(malloc_usable_size(block) < sizes[i] + 2 * PAGE && mapped_blocks() == 1);
            check_filled(block, kept, mark);
            bytes = malloc_usable_size(block);
            fill(block, 0, bytes, ++mark);
        }
        errno = 0;
        CHECK(realloc(block, too_much - start) == NULL && errno == ENOMEM);
        errno = 0;
        CHECK(realloc(block, too_much) == NULL && errno == ENOMEM);
        errno = 0;
        CHECK(realloc(block, too_much / 2) == NULL && errno == ENOMEM);
        check_filled(block, bytes, mark);
        CHECK(start_of(block) == start && malloc_usable_size(block) == bytes);
        if (round % 2 == 0) {
            CHECK(realloc(block, 0) == NULL); /* glibc frees it */
        } else {
            free(block);
        }
        CHECK(!is_mapped(block) && mapped_blocks() == 0 && all_pages() == pages);
    }
}

/* A mapping of two parts, which the kernel does not let grow: glibc allocates, copies and frees. */
static void copy_to_mapping(void) {
    free(malloc(1));
    size_t pages = all_pages();
    for (size_t round = 0; round < LINES; round++) {
        size_t bytes = MIB;
        unsigned char *block = malloc(bytes);
        CHECK(block != NULL && mapped_blocks() == 1);
        fill(block, 0, bytes, (unsigned char)round);
        char *middle = (char *)block - start_of(block) + 16 * PAGE;
        CHECK(madvise(middle, 16 * PAGE, MADV_DONTFORK) == 0);
        unsigned char *moved = realloc(block, 3 * MIB);
        CHECK(moved != NULL && malloc_usable_size(moved) >= 3 * MIB && mapped_blocks() == 1);
        CHECK(moved != block && !is_mapped(block));
        check_filled(moved, bytes, (unsigned char)round);
        fill(moved, 0, malloc_usable_size(moved), 3);
        free(moved);
        CHECK(mapped_blocks() == 0 && all_pages() == pages);
    }
}

/* Into an arena, where a free run awaits it. */
static void copy_to_arena(void) {
    CHECK(mallopt(M_MMAP_THRESHOLD, 8 << 20) == 1 && mallopt(M_TRIM_THRESHOLD, 64 << 20) == 1);
    void *run = malloc(6 * MIB);
    CHECK(run != NULL && mapped_blocks() == 0);
    free(run);
    for (size_t round = 0; round < LINES; round++) {
        CHECK(mallopt(M_MMAP_THRESHOLD, 128 << 10) == 1);
        void *taken = malloc(6 * MIB - KIB); /* or the block would come from there */
        CHECK(taken != NULL && mapped_blocks() == 0);
        unsigned char *block = malloc(MIB);
        CHECK(block != NULL && mapped_blocks() == 1);
        fill(block, 0, MIB, (unsigned char)round);
        char *middle = (char *)block - start_of(block) + 16 * PAGE;
        CHECK(madvise(middle, 16 * PAGE, MADV_DONTFORK) == 0);
        free(taken);
        unsigned char *moved = realloc(block, 3 * MIB);
        CHECK(moved != NULL && malloc_usable_size(moved) >= 3 * MIB && mapped_blocks() == 0);
        CHECK(!is_mapped(block));
        check_filled(moved, MIB, (unsigned char)round);
        fill(moved, 0, malloc_usable_size(moved), 3);
        free(moved);
    }
}

/* ---- everything at once ---- */

#define HELD 24

static void *hold_at_random(void *thread) {
    struct {
        unsigned char *start;
        size_t bytes;
        unsigned char mark;
    } held[HELD] = {0};
    uint64_t random = (uintptr_t)thread + 1;
    for (int i = 0; i < 1500; i++) {
        size_t at = check_random(&random) % HELD;
        size_t bytes = 1 + check_random(&random) % (check_random(&random) % 3 == 0 ? MIB : 100 * KIB);
        unsigned char mark = (unsigned char)check_random(&random);
        unsigned char *old = held[at].start, *block;
        size_t kept = 0;
        switch (check_random(&random) % 5) {
        case 0:
            free(old);
            block = malloc(bytes);
            break;
        case 1:
            free(old);
            block = calloc(1, bytes);
            CHECK(block != NULL);
            check_zero(block, bytes);
            break;
        case 2: {
            size_t alignment = 16UL << check_random(&random) % 12;
            free(old);
            block = memalign(alignment, bytes);
            CHECK((uintptr_t)block % alignment == 0);
            break;
        }
        default:
            kept = held[at].bytes < bytes ? held[at].bytes : bytes;
            block = realloc(old, bytes);
            break;
        }
        CHECK(block != NULL && (uintptr_t)block % 16 == 0 && malloc_usable_size(block) >= bytes);
        check_filled(block, kept, held[at].mark);
        held[at].start = block;
        held[at].bytes = malloc_usable_size(block);
        held[at].mark = mark;
        fill(block, 0, held[at].bytes, mark);
    }
    for (size_t i = 0; i < HELD; i++) {
        if (held[i].start != NULL) {
            check_filled(held[i].start, held[i].bytes, held[i].mark);
        }
        free(held[i].start);
    }
    return NULL;
}

static void at_random(void) {
    pthread_t threads[3];
    for (size_t i = 0; i < 3; i++) {
        CHECK(pthread_create(&threads[i], NULL, hold_at_random, (void *)i) == 0);
    }
    for (size_t i = 0; i < 3; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    hold_at_random((void *)7);
    CHECK(mapped_blocks() == 0);
}

/* What the parent placed, the child may resize and free. */
static void across_fork(void) {
    free(malloc(MIB)); /* of two blocks in turn, one at least begins later than glibc's would */
    unsigned char *block = malloc(MIB);
    CHECK(block != NULL);
    fill(block, 0, MIB, 1);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        block = realloc(block, 2 * MIB);
        CHECK(block != NULL);
        check_filled(block, MIB, 1);
        free(block);
        CHECK(mapped_blocks() == 0);
        free(malloc(MIB));
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_filled(block, MIB, 1);
    free(block);
    CHECK(!is_mapped(block));
}

/* An address within a block, as a program at fault may free: glibc is to find out, though a header there says
 * how far the page's first block is. */
static void free_the_inside(void) {
    char *block;
    do {
        block = malloc(MIB);
        CHECK(block != NULL);
    } while (start_of(block) > PAGE / 2);
    size_t *header = (size_t *)(block + 5 * LINE - 16);
    header[0] = start_of(block) - 16 + 5 * LINE;
    header[1] = MIB | 2;
    free(block + 5 * LINE);
    say("survived", 1);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"malloc", malloc_alike},
        {"calloc", calloc_alike},
        {"grown", grow_alike},
        {"aligned", align_alike},
        {"first", first_of_all},
        {"little-room", little_room},
        {"large-without-room", large_without_room},
        {"no-room", no_room},
        {"in-threads", in_threads},
        {"among-others", among_others},
        {"among-others-lowered", among_others_when_lowered},
        {"among-others-refused", among_others_when_refused},
        {"in-arena", in_arena},
        {"after-a-free", after_a_free},
        {"pages-of-smaller", pages_of_smaller},
        {"pages-of-whole", pages_of_whole},
        {"pages-of-larger", pages_of_larger},
        {"resize", resize},
        {"copy-to-mapping", copy_to_mapping},
        {"copy-to-arena", copy_to_arena},
        {"at-random", at_random},
        {"across-fork", across_fork},
        {"free-the-inside", free_the_inside},
    };
    static char out[4096];
    setvbuf(stdout, out, _IOFBF, sizeof out);
    CHECK(argc == 2);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
    }
    fprintf(stderr, "no case is named %s\n", argv[1]);
    return 2;
}
