/* Programs that handle NULL, under limits and failing system calls: faults CASE [ARGUMENT]. */
#include "api.h"
#include "names.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Atomic(size_t) refused, granted;

static void count(const void *block) {
    if (block == NULL) {
        CHECK_EQUAL(errno, ENOMEM);
        atomic_fetch_add(&refused, 1);
    } else {
        atomic_fetch_add(&granted, 1);
    }
}

/* ---- calls that fail now and then, or from some moment on ---- */

/* A line of each kibibyte, of large blocks fewer: these programs run once for each call that may fail. */
enum { LINE = 64 };

static size_t apart(size_t bytes) {
    return bytes < 64 * KIB ? KIB : bytes / 16;
}

static void fill_sparsely(unsigned char *block, size_t bytes, uint64_t mark) {
    for (size_t at = 0; at < bytes; at += apart(bytes)) {
        fill(block + at, bytes - at < LINE ? bytes - at : LINE, mark + at);
    }
}

static bool is_filled_sparsely(const unsigned char *block, size_t bytes, uint64_t mark) {
    for (size_t at = 0; at < bytes; at += apart(bytes)) {
        if (!is_filled(block + at, bytes - at < LINE ? bytes - at : LINE, mark + at)) {
            return false;
        }
    }
    return true;
}

static void use_size(size_t bytes, size_t blocks, size_t thread) {
    unsigned char **rows = calloc(blocks, sizeof *rows);
    count(rows);
    if (rows == NULL) {
        return;
    }
    for (size_t round = 0; round < 2; round++) {
        for (size_t i = 0; i < blocks; i++) {
            if (rows[i] != NULL) {
                continue;
            }
            rows[i] = i % 3 == 2 ? calloc(1, bytes) : malloc(bytes);
            count(rows[i]);
            if (rows[i] != NULL) {
                CHECK(i % 3 != 2 || is_zero(rows[i], bytes < 4096 ? bytes : 4096));
                fill_sparsely(rows[i], bytes, i + thread);
            }
        }
        for (size_t i = 0; i < blocks; i++) {
            if (rows[i] == NULL) {
                continue;
            }
            CHECK(is_filled_sparsely(rows[i], bytes, i + thread));
            if (i % 5 == 0) {
                unsigned char *grown = realloc(rows[i], bytes * 2);
                count(grown);
                rows[i] = grown != NULL ? grown : rows[i];
                CHECK(is_filled_sparsely(rows[i], bytes, i + thread));
                fill_sparsely(rows[i], bytes, i + thread);
            }
            if (i % 2 == round) {
                free(rows[i]);
                rows[i] = NULL;
            }
        }
        if (governed() && round == 0) {
            calm_trim(0);
        }
    }
    for (size_t i = 0; i < blocks; i++) {
        if (rows[i] != NULL) {
            CHECK(is_filled_sparsely(rows[i], bytes, i + thread));
        }
        free(rows[i]);
    }
    free(rows);
}

static void use_all_sizes(size_t thread) {
    use_size(40, 2000, thread);
    use_size(700, 400, thread);
    use_size(9000, 100, thread);
    use_size(70 * KIB, 20, thread);
    use_size(MIB, 3, thread);
    void *aligned = NULL;
    int error = posix_memalign(&aligned, 2 * MIB, 3 * MIB);
    CHECK(error == 0 || error == ENOMEM);
    if (error == 0) {
        memset(aligned, 1, 4096);
        free(aligned);
    }
}

static void *use_in_thread(void *thread) {
    use_all_sizes((size_t)(uintptr_t)thread);
    return NULL;
}

static void survive(const char *unused) {
    (void)unused;
    getppid(); /* a mark for the tracer of the system calls */
    use_all_sizes(0);
    for (uintptr_t i = 0; i < 2; i++) {
        pthread_t threads[2];
        bool runs[2];
        for (uintptr_t j = 0; j < 2; j++) {
            int error = pthread_create(&threads[j], NULL, use_in_thread, (void *)(2 * i + j));
            CHECK(error == 0 || error == EAGAIN || error == ENOMEM);
            runs[j] = error == 0;
        }
        for (size_t j = 0; j < 2; j++) {
            CHECK(!runs[j] || pthread_join(threads[j], NULL) == 0);
        }
    }
    pid_t child = fork();
    if (child == 0) {
        use_all_sizes(9);
        _exit(0);
    }
    if (child > 0) {
        check_child(child);
    } else {
        CHECK(errno == EAGAIN || errno == ENOMEM);
    }
    use_all_sizes(0);
    say("granted", atomic_load(&granted));
    say("refused", atomic_load(&refused));
}

/* ---- little address space ---- */

static size_t limit_block;
static _Atomic(size_t) got;

/* Of a large block only its ends: where two blocks share memory, one's end lies within the other, or they are
 * one. */
static void fill_ends(unsigned char *block, size_t bytes, uint64_t mark) {
    if (bytes < 64 * KIB) {
        fill(block, bytes, mark);
    } else {
        fill(block, 4 * LINE, mark);
        fill(block + bytes - 4 * LINE, 4 * LINE, mark + 1);
    }
}

static bool has_ends(const unsigned char *block, size_t bytes, uint64_t mark) {
    return bytes < 64 * KIB
               ? is_filled(block, bytes, mark)
               : is_filled(block, 4 * LINE, mark) && is_filled(block + bytes - 4 * LINE, 4 * LINE, mark + 1);
}

/* As much as there is, and then all of it back. */
static size_t exhaust(size_t bytes) {
    void *chain = NULL;
    size_t blocks = 0;
    for (;;) {
        errno = 0;
        void **block = malloc(bytes);
        if (block == NULL) {
            break;
        }
        CHECK_EQUAL(errno, 0);
        fill_ends((unsigned char *)(block + 1), bytes - sizeof *block, blocks);
        *block = chain;
        chain = block;
        blocks++;
    }
    CHECK_EQUAL(errno, ENOMEM);
    /* While there is none, what is asked for is refused in every way, and nothing is lost. */
    errno = 0;
    CHECK(calloc(1, 2 * GIB) == NULL && errno == ENOMEM);
    if (chain != NULL) {
        errno = 0;
        CHECK(realloc(chain, 2 * GIB) == NULL && errno == ENOMEM);
    }
    for (size_t i = blocks; i > 0; i--) {
        void **block = chain;
        CHECK(has_ends((unsigned char *)(block + 1), bytes - sizeof *block, i - 1));
        chain = *block;
        free(block);
    }
    CHECK(chain == NULL);
    return blocks * bytes;
}

static void exhaust_in_thread(size_t thread) {
    (void)thread;
    for (int round = 0; round < 3; round++) {
        atomic_fetch_add(&got, exhaust(limit_block));
    }
}

static void limit(const char *bytes) {
    limit_block = strtoul(bytes, NULL, 10);
    say("virtual", virtual_bytes());
    size_t first = exhaust(limit_block), second = exhaust(limit_block);
    say("first", first);
    say("second", second);
    /* Of another size: what was freed is not bound to the first. */
    say("other", exhaust(limit_block > 1000 ? 200 : 20000));
    say("again", exhaust(limit_block));
}

/* Two at a time share what there is. */
static void limit_threads(const char *bytes) {
    limit_block = strtoul(bytes, NULL, 10);
    run_threads(2, exhaust_in_thread);
    say("threads", atomic_load(&got));
    say("again", exhaust(limit_block));
}

/* ---- what else needs address space, once all blocks are freed ---- */

enum { ROOM = 8 }; /* MiB */

static void *return_argument(void *argument) {
    return argument;
}

static bool thread_starts(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, ROOM * MIB) == 0);
    int error = pthread_create(&thread, &attributes, return_argument, NULL);
    CHECK(error == 0 || error == EAGAIN);
    return error == 0 && pthread_join(thread, NULL) == 0;
}

static bool is_released(void *base) {
    return base != MAP_FAILED && munmap(base, ROOM * MIB) == 0;
}

static bool can_map(void) {
    errno = 5;
    void *base = mmap(NULL, ROOM * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(base == MAP_FAILED || errno == 5);
    return is_released(base);
}

/* Past the wrappers of the library, as the C library itself does. */
static bool has_room(void) {
    return is_released((void *)syscall(SYS_mmap, NULL, ROOM * MIB, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

static bool has_room_once_trimmed(void) {
    calm_trim(0);
    return has_room();
}

static bool has_room_once_idle(void) {
    WAIT_UNTIL(has_room());
    return true;
}

static bool library_opens(void) {
    void *library = dlopen("libm.so.6", RTLD_NOW);
    return library != NULL && dlclose(library) == 0;
}

/* "HOW BLOCK KEPT LIMIT": fills address space with blocks, and frees all but the KEPT last ones, and but each
 * 1,000th if KEPT is above 1; LIMIT in MiB is set before, unless it is 0. */
static void make_room(const char *argument) {
    static const struct {
        const char *name;
        bool (*succeeds)(void);
    } ways[] = {{"thread", thread_starts},
                {"map", can_map},
                {"trim", has_room_once_trimmed},
                {"idle", has_room_once_idle},
                {"library", library_opens}};
    char how[16];
    size_t bytes, kept, space;
    CHECK(sscanf(argument, "%15s %zu %zu %zu", how, &bytes, &kept, &space) == 4);
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
    limit.rlim_cur = space == 0 ? limit.rlim_cur : space * MIB;
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    void **first = NULL, **last = NULL;
    size_t blocks = 0;
    for (void **block; (block = malloc(bytes)) != NULL; blocks++) {
        *block = NULL;
        *(last == NULL ? (void **)&first : last) = block;
        last = block;
    }
    say("got", blocks * bytes);
    CHECK(blocks * bytes > ROOM * MIB && !has_room());
    for (size_t i = 0; first != NULL; i++) {
        void **block = first;
        first = *block;
        if (i + kept < blocks && (kept <= 1 || i % 1000 != 0)) {
            free(block);
        }
    }
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        if (strcmp(ways[i].name, how) == 0) {
            say("succeeds", ways[i].succeeds());
        }
    }
    /* And the heap goes on. */
    void *block = malloc(ROOM / 2 * MIB);
    CHECK(block != NULL);
    fill(block, MIB, 1);
    free(block);
}

/* A limit that the library is not told of: by another process, or as here. */
static void unseen_limit(const char *unused) {
    (void)unused;
    use_blocks(1, 2000);
    const struct rlimit limit = {GIB, GIB};
    CHECK(syscall(SYS_prlimit64, 0, RLIMIT_AS, &limit, NULL) == 0);
    CHECK(!has_room());
    CHECK(can_map() && has_room());
    use_blocks(2, 2000);
}

/* ---- as many mappings as a process may have ---- */

enum { MANY_MAPPINGS = 200000, SMALL_BYTES = 100, SMALL_MIB = 200, FREED_MIB = 500 };

/* Each page by itself, since its neighbours have other rights. */
static void map_until_refused(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *pages =
        mmap(NULL, MANY_MAPPINGS * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(pages != MAP_FAILED);
    size_t number = 0;
    while (number < MANY_MAPPINGS && mprotect(pages + number * page, page, PROT_READ) == 0) {
        number += 2;
    }
    size_t single = 0;
    while (single < MANY_MAPPINGS && mmap(NULL, page, single % 2 == 0 ? PROT_READ : PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED) {
        single++;
    }
    if (number >= MANY_MAPPINGS || single >= MANY_MAPPINGS) {
        fprintf(stderr, "a process may have more mappings here\n");
        _Exit(CANNOT);
    }
}

static void free_large(void) {
    enum { BLOCKS = 50 };
    static unsigned char *block[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) {
        block[i] = malloc(FREED_MIB * MIB / BLOCKS);
        CHECK(block[i] != NULL);
        fill_sparsely(block[i], FREED_MIB * MIB / BLOCKS, i);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        free(block[i]);
    }
}

static void take_small(void) {
    size_t bytes = 0;
    while (bytes < SMALL_MIB * MIB && malloc(SMALL_BYTES) != NULL) {
        bytes += SMALL_BYTES;
    }
    say("small", bytes);
}

/* What the heap has then: "freed", 500 MiB of free memory; "trimmed", the same without pages; "little". */
static void many_mappings(const char *before) {
    free(malloc(SMALL_BYTES));
    if (strcmp(before, "little") != 0) {
        free_large();
    }
    if (strcmp(before, "trimmed") == 0 && governed()) {
        calm_trim(0);
    }
    map_until_refused();
    take_small();
}

/* ---- locked memory ---- */

enum { LOCKED_BLOCKS = 1500 };

static void hold_and_free(size_t thread) {
    for (int round = 0; round < 3; round++) {
        void **rows = own_pages(LOCKED_BLOCKS * sizeof *rows);
        for (size_t i = 0; i < LOCKED_BLOCKS; i++) {
            rows[i] = malloc(20 * KIB);
            CHECK(rows[i] != NULL);
            fill(rows[i], 20 * KIB, i + thread);
        }
        for (size_t i = LOCKED_BLOCKS; i > 0; i--) {
            CHECK(is_filled(rows[i - 1], 20 * KIB, i - 1 + thread));
            free(rows[i - 1]);
        }
        CHECK(munmap(rows, LOCKED_BLOCKS * sizeof *rows) == 0);
    }
}

/* Locks before the first block, where the library is linked statically. */
static void lock(const char *unused) {
    (void)unused;
    if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) {
        fprintf(stderr, "memory may not be locked here\n");
        _Exit(CANNOT);
    }
    size_t before = resident_bytes();
    void *first = malloc(100);
    CHECK(first != NULL);
    say("grown_by_first", grown_since(before));
    before = resident_bytes();
    hold_and_free(0);
    say("grown_by_one", grown_since(before));
    run_threads(4, hold_and_free);
    say("grown_by_all", grown_since(before));
    say("frees", (1 + 4) * 3 * (size_t)LOCKED_BLOCKS);
    struct calm_stats stats = stats_now();
    say("purge_failures", stats.purge_failures);
    say("purged", stats.purged);
    CHECK(munlockall() == 0);
    /* Once it may, it gives back again. */
    hold_and_free(0);
    WAIT_UNTIL((calm_trim(0), grown_since(before) < 24 * MIB));
    free(first);
}

/* Purges are answered, and do nothing, as by an emulator: from now on, or ("exec") for a program from its
 * start. */
static void purged_in_vain(const char *argument) {
    enum { BLOCKS = 6000 };
    static void *blocks[BLOCKS];
    if (strcmp(argument, "after") != 0) {
        deny_call(SYS_madvise, 0);
        deny_call(SYS_process_madvise, 0);
    }
    if (strcmp(argument, "exec") == 0) {
        execl("/proc/self/exe", "faults", "purged-in-vain", "after", NULL);
        _Exit(1);
    }
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < BLOCKS; i++) {
            blocks[i] = calloc(1, 100 + i * 7);
            CHECK(blocks[i] != NULL && is_zero(blocks[i], 100 + i * 7));
            memset(blocks[i], 0xa5, 100 + i * 7);
        }
        for (size_t i = 0; i < BLOCKS; i++) {
            free(blocks[i]);
        }
        malloc_trim(0);
    }
    say("zero", 1);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {{"survive", survive},
                                             {"limit", limit},
                                             {"limit-threads", limit_threads},
                                             {"lock", lock},
                                             {"purged-in-vain", purged_in_vain},
                                             {"make-room", make_room},
                                             {"unseen-limit", unseen_limit},
                                             {"many-mappings", many_mappings}};
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
