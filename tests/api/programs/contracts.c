/* What each function promises, errno included: contracts CASE. The cases of calm_... functions need
 * calmalloc. */
#include "api.h"
#include "names.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#ifdef __GLIBC__
#include <gnu/libc-version.h>
#if !__GLIBC_PREREQ(2, 33)
#define mallinfo2 mallinfo /* whose numbers are of 32 bits: enough here */
#endif
#endif

#define UNTOUCHED 4321 /* of errno */

/* For what is asked of calmalloc alone: other mallocs differ here. */
#define CHECK_OURS(condition) CHECK(!governed() || (condition))

static void use_all(void *block, size_t at_least) {
    CHECK(block != NULL);
    size_t usable = malloc_usable_size(block);
    CHECK(usable >= at_least);
    fill(block, usable, 77);
    CHECK(is_filled(block, usable, 77));
}

/* ---- zero bytes ---- */

static void zero_bytes(const char *unused) {
    (void)unused;
    enum { EACH = 50 };
    void *blocks[4 * EACH];
    errno = UNTOUCHED;
    for (size_t i = 0; i < EACH; i++) {
        blocks[4 * i] = malloc(opaque(0));
        blocks[4 * i + 1] = calloc(opaque(0), 100);
        blocks[4 * i + 2] = calloc(100, opaque(0));
        blocks[4 * i + 3] = realloc(NULL, opaque(0));
    }
    CHECK_EQUAL(errno, UNTOUCHED);
    /* Each is a block of its own. */
    for (size_t i = 0; i < 4 * EACH; i++) {
        CHECK(blocks[i] != NULL && (uintptr_t)blocks[i] % 16 == 0);
        for (size_t j = 0; j < i; j++) {
            CHECK(blocks[i] != blocks[j]);
        }
    }
    for (size_t i = 0; i < 4 * EACH; i++) {
        free(blocks[i]);
    }
    void *aligned = NULL;
    CHECK_EQUAL(posix_memalign(&aligned, 64, 0), 0);
    CHECK(aligned != NULL && (uintptr_t)aligned % 64 == 0);
    free(aligned);
    aligned = aligned_alloc(256, opaque(0));
    CHECK(aligned != NULL && (uintptr_t)aligned % 256 == 0);
    free(aligned);
}

/* ---- more than there is ---- */

#define REFUSED(call)               \
    do {                            \
        errno = 0;                  \
        CHECK((call) == NULL);      \
        CHECK_EQUAL(errno, ENOMEM); \
    } while (0)

static void huge_sizes(const char *unused) {
    (void)unused;
    void *block = malloc(100);
    CHECK(block != NULL);
    fill(block, 100, 1);
    const size_t sizes[] = {
        PTRDIFF_MAX,           (size_t)PTRDIFF_MAX + 1, SIZE_MAX,      SIZE_MAX - 1,
        SIZE_MAX - 15,         SIZE_MAX - 16,           SIZE_MAX - 31, SIZE_MAX - 4095,
        SIZE_MAX - 4096,       SIZE_MAX - 65536,        SIZE_MAX / 2,  SIZE_MAX / 2 + 2,
        PTRDIFF_MAX - 4096,    PTRDIFF_MAX - 100,       SIZE_MAX / 4,  SIZE_MAX - (1UL << 21),
        SIZE_MAX - (1UL << 30)};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        size_t size = opaque(sizes[i]);
        REFUSED(malloc(size));
        REFUSED(calloc(1, size));
        REFUSED(calloc(size, 1));
        REFUSED(calloc(size, 2));
        REFUSED(realloc(NULL, size));
        REFUSED(realloc(block, size));
        REFUSED(reallocarray(block, 1, size));
        REFUSED(reallocarray(block, size, 3));
        REFUSED(aligned_alloc(16, size));
        REFUSED(aligned_alloc(64, size));
        REFUSED(aligned_alloc(1 << 21, size));
        void *kept = &kept;
        errno = UNTOUCHED;
        CHECK_EQUAL(posix_memalign(&kept, 64, size), ENOMEM);
        CHECK(kept == (void *)&kept);
        CHECK_EQUAL(errno, ENOMEM);
#ifdef __GLIBC__
        REFUSED(memalign(64, size));
        REFUSED(valloc(size));
        REFUSED(pvalloc(size));
#endif
        CHECK(is_filled(block, 100, 1));
    }
    free(block);
}

static void products(const char *unused) {
    (void)unused;
    void *block = malloc(100);
    CHECK(block != NULL);
    fill(block, 100, 1);
    size_t half = opaque(SIZE_MAX / 2);
    REFUSED(calloc(half + 2, 2)); /* the product is 2 */
    REFUSED(calloc(2, half + 2));
    REFUSED(calloc(opaque((size_t)1 << 32), opaque((size_t)1 << 32))); /* 0 */
    REFUSED(calloc(opaque(SIZE_MAX), opaque(SIZE_MAX)));               /* 1 */
    REFUSED(reallocarray(block, half + 2, 2));
    REFUSED(reallocarray(NULL, half + 2, 2));
    REFUSED(reallocarray(block, opaque((size_t)1 << 32), opaque((size_t)1 << 32)));
    CHECK(is_filled(block, 100, 1));
    free(block);
}

/* An alignment so large that size and alignment together overflow. */
static void huge_alignments(const char *unused) {
    (void)unused;
    for (int bit = 44; bit < 64; bit++) {
        size_t alignment = (size_t)1 << opaque((size_t)bit);
        void *kept = &kept;
        int error = posix_memalign(&kept, alignment, 100);
        if (error == 0) {
            CHECK((uintptr_t)kept % alignment == 0);
            free(kept);
        } else {
            CHECK((error == ENOMEM || error == EINVAL) && kept == (void *)&kept);
        }
        CHECK(bit < 48 || error != 0);
        errno = 0;
        void *block = aligned_alloc(alignment, opaque(100));
        CHECK(block != NULL ? (uintptr_t)block % alignment == 0 : errno == ENOMEM || errno == EINVAL);
        free(block);
        errno = 0;
        CHECK(aligned_alloc(alignment, opaque(SIZE_MAX - 100)) == NULL &&
              (errno == ENOMEM || errno == EINVAL));
    }
}

/* ---- realloc ---- */

static void realloc_null(const char *unused) {
    (void)unused;
    errno = UNTOUCHED;
    for (size_t bytes = 1; bytes < 300000; bytes = bytes * 3 + 1) {
        void *block = realloc(NULL, bytes);
        use_all(block, bytes);
        free(block);
        block = reallocarray(NULL, bytes, 3);
        use_all(block, bytes * 3);
        free(block);
    }
    CHECK_EQUAL(errno, UNTOUCHED);
}

/* glibc's way: the block is freed, and NULL is no failure. */
static void realloc_zero(const char *unused) {
    (void)unused;
    for (size_t bytes = 0; bytes < 3 * MIB; bytes = bytes * 5 + 1) {
        for (int way = 0; way < 3; way++) {
            void *block = malloc(bytes);
            CHECK(block != NULL);
            errno = UNTOUCHED;
            void *none = way == 0 ? realloc(block, opaque(0)) : reallocarray(block, way - 1, opaque(0));
            CHECK(none == NULL);
            CHECK_EQUAL(errno, UNTOUCHED);
        }
    }
    if (governed()) {
        /* It was freed: no memory is lost. */
        void *warm = malloc(200 * KIB);
        free(warm);
        calm_trim(0);
        struct calm_stats before = stats_now();
        for (int i = 0; i < 100; i++) {
            void *none = realloc(malloc(200 * KIB), opaque(0));
            CHECK(none == NULL);
        }
        calm_trim(0);
        CHECK_ACCOUNT(stats_now().in_use <= before.in_use + 200 * KIB);
    }
}

static void realloc_fails_softly(const char *unused) {
    (void)unused;
    for (size_t bytes = 1; bytes < 20 * MIB; bytes = bytes * 7 + 3) {
        void *block = malloc(bytes);
        CHECK(block != NULL);
        fill(block, bytes, bytes);
        REFUSED(realloc(block, opaque(PTRDIFF_MAX)));
        CHECK(is_filled(block, bytes, bytes));
        free(block);
    }
}

/* ---- alignment ---- */

static void posix_memalign_refuses(const char *unused) {
    (void)unused;
    const size_t bad[] = {0,  1,  2,  3,    4,    5,    7,        9,        12,          24,
                          40, 48, 65, 1000, 4095, 4097, 3 * 4096, SIZE_MAX, SIZE_MAX - 7};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        void *kept = &kept;
        errno = UNTOUCHED;
        CHECK_EQUAL(posix_memalign(&kept, opaque(bad[i]), 100), EINVAL);
        CHECK(kept == (void *)&kept);
        CHECK_EQUAL(errno, UNTOUCHED);
    }
}

/* What there is no memory for is refused with errno set, in the result and beside it. */
static void posix_memalign_fails(const char *unused) {
    (void)unused;
    void *kept = &kept;
    errno = UNTOUCHED;
    CHECK_EQUAL(posix_memalign(&kept, 64, opaque(SIZE_MAX / 4)), ENOMEM);
    CHECK_EQUAL(errno, ENOMEM);
    CHECK(kept == (void *)&kept);
}

/* More than the machine has: what the kernel would map for anybody. */
static void more_than_memory(const char *unused) {
    (void)unused;
    size_t bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE) / 2 * 3;
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool may = mapped != MAP_FAILED;
    CHECK(!may || munmap(mapped, bytes) == 0);
    void *block = malloc(opaque(bytes));
    CHECK((block != NULL) == may);
    free(block);
    block = calloc(opaque(bytes), 1);
    CHECK((block != NULL) == may);
    free(block);
    block = malloc(MIB);
    void *grown = realloc(block, opaque(bytes));
    CHECK((grown != NULL) == may);
    free(grown != NULL ? grown : block);
}

/* One block at a time, each longer than the last: what was freed is not in the way. */
static void grows_within_a_limit(const char *unused) {
    (void)unused;
    free(malloc(opaque(100)));
    struct rlimit limit = {.rlim_cur = 768 * MIB, .rlim_max = RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    for (size_t bytes = 16 * MIB; bytes <= 448 * MIB; bytes += 16 * MIB) {
        unsigned char *block = malloc(opaque(bytes));
        CHECK(block != NULL);
        block[0] = block[bytes - 1] = 1;
        free(block);
    }
}

static void posix_memalign_grants(const char *unused) {
    (void)unused;
    for (size_t alignment = sizeof(void *); alignment <= 4 * MIB; alignment *= 2) {
        void *block = NULL;
        errno = UNTOUCHED;
        CHECK_EQUAL(posix_memalign(&block, alignment, 1000), 0);
        CHECK_EQUAL(errno, UNTOUCHED);
        CHECK_EQUAL((uintptr_t)block % alignment, 0);
        use_all(block, 1000);
        free(block);
    }
}

/* Whether aligned_alloc takes an alignment that is no power of two. */
static bool takes_odd_alignment(size_t alignment) {
#ifdef __GLIBC__
    return strverscmp(gnu_get_libc_version(), "2.38") < 0 && alignment <= (size_t)PTRDIFF_MAX + 1;
#else
    return alignment == 0;
#endif
}

/* The size need not be a multiple of the alignment. */
static void aligned_alloc_all(const char *unused) {
    (void)unused;
    for (size_t alignment = 1; alignment <= 1 * MIB; alignment *= 2) {
        for (size_t bytes = 1; bytes < 100000; bytes = bytes * 3 + 1) {
            void *block = aligned_alloc(opaque(alignment), bytes);
            CHECK(block != NULL && (uintptr_t)block % alignment == 0 && (uintptr_t)block % 16 == 0);
            use_all(block, bytes);
            free(block);
        }
    }
    const size_t odd[] = {0, 3, 24, 48, 100, 1000, 4097, PTRDIFF_MAX + (size_t)2, SIZE_MAX};
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        errno = 0;
        void *block = aligned_alloc(opaque(odd[i]), 100);
        CHECK((block != NULL) == takes_odd_alignment(odd[i]));
        if (block == NULL) {
            CHECK_EQUAL(errno, EINVAL);
            continue;
        }
        size_t power = 16;
        while (power < odd[i]) {
            power *= 2;
        }
        CHECK_EQUAL((uintptr_t)block % power, 0);
        use_all(block, 100);
        free(block);
    }
}

static size_t page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* For who set it. */
static void page_size(const char *unused) {
    (void)unused;
    say("page_bytes", page_bytes());
}

#ifdef __GLIBC__

static void old_aligned(const char *unused) {
    (void)unused;
    size_t page = page_bytes();
    for (size_t bytes = 1; bytes < 300000; bytes = bytes * 3 + 1) {
        for (size_t alignment = 8; alignment <= 64 * KIB; alignment *= 2) {
            void *block = memalign(alignment, bytes);
            CHECK(block != NULL && (uintptr_t)block % alignment == 0);
            use_all(block, bytes);
            free(block);
        }
        void *block = valloc(bytes);
        CHECK(block != NULL && (uintptr_t)block % page == 0);
        use_all(block, bytes);
        free(block);
        block = pvalloc(bytes);
        CHECK(block != NULL && (uintptr_t)block % page == 0);
        use_all(block, (bytes + page - 1) / page * page);
        free(block);
    }
    void *block = memalign(opaque(48), 100);
    CHECK(block != NULL ? (uintptr_t)block % 16 == 0 : errno == EINVAL);
    free(block);
    block = valloc(opaque(0));
    CHECK(block != NULL && (uintptr_t)block % page == 0);
    free(block);
    block = pvalloc(opaque(0));
    CHECK(block != NULL && (uintptr_t)block % page == 0);
    free(block);
    errno = UNTOUCHED;
    CHECK(memalign(opaque((size_t)1 << 63), 100) == NULL && errno == ENOMEM);
    CHECK(memalign(opaque(((size_t)1 << 63) + 1), 100) == NULL && errno == EINVAL);
}

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *block, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *block);

/* glibc's other names for malloc and its kin go with them. */
static void libc_names(const char *unused) {
    (void)unused;
    void *block = __libc_malloc(100);
    use_all(block, 100);
    block = realloc(block, 5000);
    use_all(block, 5000);
    free(block);
    block = __libc_realloc(malloc(100), 300 * KIB);
    use_all(block, 300 * KIB);
    __libc_free(block);
    block = __libc_calloc(10, 100);
    CHECK(block != NULL && is_zero(block, 1000));
    free(block);
    block = __libc_memalign(256, 100);
    CHECK(block != NULL && (uintptr_t)block % 256 == 0);
    free(block);
    __libc_free(malloc(100));
}
#endif

/* ---- usable sizes, freeing ---- */

static void usable_sizes(const char *unused) {
    (void)unused;
    CHECK_EQUAL(malloc_usable_size(NULL), 0);
    for (size_t bytes = 0; bytes < 4 * MIB; bytes = bytes + 1 + bytes / 9) {
        unsigned char *block = malloc(bytes), *next = malloc(bytes);
        CHECK(block != NULL && next != NULL);
        size_t usable = malloc_usable_size(block);
        CHECK(usable >= bytes);
        fill(next, bytes, 5);
        memset(block, 0xFF, usable);
        CHECK(is_filled(next, bytes, 5));
        /* It stays what it was. */
        CHECK_EQUAL(malloc_usable_size(block), usable);
        void *same = realloc(block, usable > 0 ? usable : 1);
        CHECK(same != NULL);
        CHECK_OURS(same == block);
        free(same);
        free(next);
    }
}

static void sized_frees(const char *unused) {
    (void)unused;
    CHECK_OURS(HAS_SIZED_FREES);
    if (!HAS_SIZED_FREES) {
        return;
    }
    errno = UNTOUCHED;
    free_sized(NULL, 0);
    free_sized(NULL, 100);
    for (size_t round = 0; round < 30; round++) {
        for (size_t bytes = 0; bytes < 3 * MIB; bytes = bytes * 2 + 1) {
            void *block = malloc(bytes);
            use_all(block, bytes);
            free_sized(block, bytes);
            block = calloc(1, bytes);
            use_all(block, bytes);
            free_sized(block, bytes);
            block = realloc(malloc(10), bytes + 1);
            use_all(block, bytes + 1);
            free_sized(block, bytes + 1);
        }
    }
    CHECK_EQUAL(errno, UNTOUCHED);
}

static void aligned_sized_frees(const char *unused) {
    (void)unused;
    CHECK_OURS(HAS_SIZED_FREES);
    if (!HAS_SIZED_FREES) {
        return;
    }
    errno = UNTOUCHED;
    free_aligned_sized(NULL, 64, 100);
    for (size_t round = 0; round < 30; round++) {
        for (size_t bytes = 0; bytes < 3 * MIB; bytes = bytes * 2 + 1) {
            void *block = aligned_alloc(256, bytes);
            use_all(block, bytes);
            free_aligned_sized(block, 256, bytes);
        }
    }
    CHECK_EQUAL(errno, UNTOUCHED);
}

/* Whatever free does, purging included, errno is the program's. */
static void keep_errno(size_t thread) {
    enum { BLOCKS = 400 };
    static void *all[MAX_THREADS][BLOCKS];
    void **rows = all[thread];
    errno = UNTOUCHED;
    free(NULL);
    for (size_t bytes = 16; bytes <= 100 * KIB; bytes *= 5) {
        for (size_t i = 0; i < BLOCKS; i++) {
            rows[i] = malloc(bytes);
            CHECK(rows[i] != NULL && errno == UNTOUCHED);
            *(volatile char *)rows[i] = 1;
        }
        for (size_t i = BLOCKS; i > 0; i--) {
            free(rows[i - 1]);
            CHECK_EQUAL(errno, UNTOUCHED);
        }
    }
    void *large = malloc(50 * MIB);
    CHECK(large != NULL && errno == UNTOUCHED);
    memset(large, 1, 50 * MIB);
    large = realloc(large, 90 * MIB);
    CHECK(large != NULL && errno == UNTOUCHED);
    free(large);
    CHECK_EQUAL(errno, UNTOUCHED);
}

static void errno_is_kept(const char *unused) {
    (void)unused;
    keep_errno(0);
    run_threads(4, keep_errno);
}

/* ---- glibc's own additions ---- */

#ifdef __GLIBC__

/* 64 MiB in blocks of so many bytes, each touched. */
static void **hold_much(size_t bytes) {
    size_t count = 64 * MIB / bytes;
    void **rows = own_pages((count + 1) * sizeof *rows);
    for (size_t i = 0; i < count; i++) {
        rows[i] = malloc(bytes);
        CHECK(rows[i] != NULL);
        memset(rows[i], 1, bytes);
    }
    return rows;
}

static void drop_much(void **rows) {
    for (size_t i = 0; rows[i] != NULL; i++) {
        free(rows[i]);
    }
}

static void trim_all(const char *unused) {
    (void)unused;
    for (size_t bytes = 100; bytes <= 100 * KIB; bytes *= 10) {
        size_t before = resident_bytes();
        void **rows = hold_much(bytes);
        CHECK(grown_since(before) >= 60 * MIB);
        drop_much(rows);
        malloc_trim(0);
        size_t table = 64 * MIB / bytes * sizeof(void *) + 8 * KIB;
        CHECK_ACCOUNT(grown_since(before) <= 2 * MIB + table);
    }
    if (governed()) {
        /* It says whether there was anything to give back. */
        CHECK(calm_set("memory_per_cpu", "160") == 0);
        void **rows = hold_much(1000);
        drop_much(rows);
        CHECK_ACCOUNT(malloc_trim(0) == 1);
        CHECK_ACCOUNT(malloc_trim(0) == 0);
    }
}

static size_t in_use_by_mallinfo(void) {
    struct mallinfo2 info = mallinfo2();
    CHECK_EQUAL(info.uordblks + info.fordblks, info.arena);
    return info.uordblks + info.hblkhd;
}

static bool old_mallinfo_agrees(void) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    struct mallinfo old = mallinfo();
#pragma GCC diagnostic pop
    struct mallinfo2 info = mallinfo2();
    return (unsigned)old.arena == (unsigned)info.arena && (unsigned)old.uordblks == (unsigned)info.uordblks;
}

static void mallinfo_counts(const char *unused) {
    (void)unused;
    for (size_t bytes = 100; bytes <= MIB; bytes *= 10) {
        size_t before = in_use_by_mallinfo();
        void **rows = hold_much(bytes);
        size_t during = in_use_by_mallinfo();
        CHECK(during >= before + 63 * MIB && during <= before + 90 * MIB);
        /* A server may make something ready between the two. */
        WAIT_UNTIL(old_mallinfo_agrees());
        drop_much(rows);
        size_t after = in_use_by_mallinfo();
        CHECK(after <= before + 8 * MIB);
    }
}

static void malloc_info_to(const char *path) {
    FILE *stream = fopen(path, "w");
    CHECK(stream != NULL);
    void *block = malloc(100 * KIB);
    CHECK_EQUAL(malloc_info(0, stream), 0);
    CHECK(malloc_info(1, stream) != 0);
    CHECK(fclose(stream) == 0);
    free(block);
}

static void malloc_stats_shows(const char *unused) {
    (void)unused;
    malloc_stats();
}

static void mallopt_takes(const char *unused) {
    (void)unused;
    const int known[][2] = {{M_MXFAST, 64},
                            {M_TRIM_THRESHOLD, 1 << 20},
                            {M_TOP_PAD, 1 << 16},
                            {M_MMAP_MAX, 1000},
                            {M_MMAP_THRESHOLD, 1 << 20},
                            {M_CHECK_ACTION, 3},
                            {M_ARENA_TEST, 4},
                            {M_ARENA_MAX, 2}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        CHECK_EQUAL(mallopt(known[i][0], known[i][1]), 1);
    }
    mallopt(12345, 1);
    void *block = malloc(5 * MIB);
    use_all(block, 5 * MIB);
    free(block);
}

/* Every name of the family is the library's, as a library loaded later, or the C library itself, would find
 * it. */
static void names_are_ours(const char *unused) {
    (void)unused;
    const char *names[] = {
        "malloc",        "free",     "calloc",     "realloc",           "reallocarray",
        "aligned_alloc", "memalign", "valloc",     "pvalloc",           "posix_memalign",
        "malloc_trim",   "mallinfo", "mallinfo2",  "malloc_info",       "malloc_usable_size",
        "malloc_stats",  "mallopt",  "free_sized", "free_aligned_sized"};
    Dl_info ours;
    CHECK(governed() && dladdr(dlsym(RTLD_DEFAULT, "calm_malloc"), &ours) != 0);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        Dl_info found;
        void *symbol = dlsym(RTLD_DEFAULT, names[i]);
        if (symbol == NULL || dladdr(symbol, &found) == 0 || found.dli_fbase != ours.dli_fbase) {
            fprintf(stderr, "%s is not the library's\n", names[i]);
            _Exit(1);
        }
    }
}

/* What the C library allocates by itself is freed by us, and the other way round. */
static void with_libc(const char *unused) {
    (void)unused;
    char *copy = strdup("copied"), *text = NULL, *line = NULL;
    CHECK(copy != NULL && strcmp(copy, "copied") == 0);
    CHECK(malloc_usable_size(copy) >= 7);
    CHECK(asprintf(&text, "%s %d", copy, 12) == 9 && strcmp(text, "copied 12") == 0);
    size_t capacity = 0;
    FILE *stream = fopen("/proc/self/maps", "r");
    CHECK(stream != NULL);
    size_t lines = 0;
    while (getline(&line, &capacity, stream) > 0) {
        lines++;
    }
    CHECK(lines > 3 && fclose(stream) == 0);
    line = realloc(line, 100000);
    CHECK(line != NULL);
    char *path = realpath("/proc/self/../self/exe", NULL);
    CHECK(path != NULL);
    free(path);
    free(line);
    free(text);
    free(copy);
}
#endif

/* ---- calmalloc's own interface ---- */

static void calm_family(const char *unused) {
    (void)unused;
    unsigned char *block = calm_malloc(100);
    CHECK(block != NULL && calm_malloc_usable_size(block) >= 100);
    fill(block, 96, 3);
    block = calm_realloc(block, 5000);
    CHECK(block != NULL && is_filled(block, 96, 3));
    block = calm_reallocarray(block, 100, 1000);
    CHECK(block != NULL && is_filled(block, 96, 3));
    calm_free(block);
    block = calm_calloc(10, 100);
    CHECK(block != NULL && is_zero(block, 1000));
    calm_free_sized(block, 1000);
    block = calm_aligned_alloc(4096, 100);
    CHECK(block != NULL && (uintptr_t)block % 4096 == 0);
    calm_free_aligned_sized(block, 4096, 100);
    void *aligned = NULL;
    CHECK(calm_posix_memalign(&aligned, 1024, 100) == 0 && (uintptr_t)aligned % 1024 == 0);
    calm_free(aligned);
    CHECK_EQUAL(calm_posix_memalign(&aligned, opaque(100), 100), EINVAL);
    calm_free(NULL);
    CHECK_EQUAL(calm_malloc_usable_size(NULL), 0);
    REFUSED(calm_malloc(opaque(SIZE_MAX)));
    REFUSED(calm_calloc(opaque(SIZE_MAX), 2));
#ifndef USE_CALM_NAMES
    /* One heap under two names. */
    block = malloc(300);
    CHECK(block != NULL);
    block = calm_realloc(block, 3000);
    free(block);
    block = calm_malloc(300);
    CHECK(malloc_usable_size(block) == calm_malloc_usable_size(block));
    free(block);
    block = malloc(70000);
    calm_free(block);
#endif
}

/* It grows between the two where another CPU comes into use. */
static bool limit_agrees(size_t size) {
    struct calm_stats prefix;
    CHECK_EQUAL(calm_stats(&prefix, size), 0);
    return prefix.cached_limit == stats_now().cached_limit;
}

/* Where the structure of each version ends, from version 1 on: what programs that were compiled for it pass.
 */
static const size_t stats_ends[] = {
    offsetof(struct calm_stats, cache_lock_reason) + sizeof(uint64_t),
};
_Static_assert(sizeof stats_ends / sizeof *stats_ends == CALM_STATS_VERSION, "list where the version ends");

static void stats_sizes(const char *unused) {
    (void)unused;
    struct calm_stats full = stats_now();
    CHECK_EQUAL(full.version, CALM_STATS_VERSION);
    CHECK_EQUAL(stats_ends[0], 240);
    CHECK_EQUAL(stats_ends[CALM_STATS_VERSION - 1], sizeof full);
    errno = 0;
    CHECK(calm_stats(NULL, sizeof full) == -1 && errno == EINVAL);
    unsigned char bytes[sizeof full + 256];
    for (size_t size = 0; size < 8; size++) {
        memset(bytes, 0xEE, sizeof bytes);
        errno = 0;
        CHECK(calm_stats((struct calm_stats *)bytes, size) == -1 && errno == EINVAL);
        CHECK(bytes[0] == 0xEE && bytes[7] == 0xEE);
    }
    for (size_t size = 8; size <= sizeof bytes; size++) {
        memset(bytes, 0xEE, sizeof bytes);
        errno = UNTOUCHED;
        CHECK_EQUAL(calm_stats((struct calm_stats *)bytes, size), 0);
        CHECK_EQUAL(errno, UNTOUCHED);
        uint32_t filled;
        memcpy(&filled, bytes + 4, 4);
        size_t most = size < sizeof full ? size : sizeof full;
        CHECK(filled <= most && filled + 8 > most);
        for (size_t i = filled; i < sizeof bytes; i++) {
            CHECK(bytes[i] == 0xEE);
        }
        /* The prefix is that of the whole. */
        WAIT_UNTIL(size < offsetof(struct calm_stats, cached_limit) + 8 || limit_agrees(size));
    }
}

static void stats_count(const char *unused) {
    (void)unused;
    enum { BLOCKS = 30 };
    struct calm_stats before = stats_now();
    void *blocks[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(MIB);
        CHECK(blocks[i] != NULL);
        memset(blocks[i], 1, MIB);
    }
    struct calm_stats during = stats_now();
    CHECK_ACCOUNT(during.in_use >= before.in_use + BLOCKS * MIB - before.cached);
    CHECK_ACCOUNT(during.in_use <= before.in_use + during.cached + (BLOCKS + 3) * MIB);
    CHECK_ACCOUNT(during.large_allocations >= before.large_allocations + BLOCKS);
    CHECK_ACCOUNT(during.footprint <= during.reserved);
    for (size_t i = 0; i < BLOCKS; i++) {
        free(blocks[i]);
    }
    struct calm_stats after = stats_now();
    CHECK_ACCOUNT(after.in_use <= before.in_use + after.cached + MIB);
    CHECK_ACCOUNT(after.dirtied >= before.dirtied + BLOCKS * MIB - after.cached);
    CHECK_ACCOUNT(after.dirty <= after.dirty_limit && after.cached <= after.cached_limit);
}

static void stats_json(const char *unused) {
    (void)unused;
    static char whole[16384], part[16384];
    memset(whole, 'x', sizeof whole);
    int length = calm_stats_json(whole, sizeof whole);
    CHECK(length > 0 && (size_t)length < sizeof whole && whole[length] == '\0');
    CHECK(strlen(whole) == (size_t)length);
    CHECK(calm_stats_json(NULL, 0) > 0);
    /* Shorter: as snprintf. */
    for (size_t size = 1; size < 200; size++) {
        memset(part, 'x', sizeof part);
        int would = calm_stats_json(part, size);
        CHECK(would > length - 64 && would < length + 64);
        CHECK(strlen(part) == size - 1);
        CHECK(part[size] == 'x');
        CHECK(size < 2 || part[0] == '{');
    }
    puts(whole);
    fflush(stdout);
}

/* Text of an option's value. */
static const char *get(const char *name) {
    static char value[256];
    int length = calm_get(name, value, sizeof value);
    CHECK(length >= 0 && (size_t)length == strlen(value));
    return value;
}

static void get_as_snprintf(const char *unused) {
    (void)unused;
    char value[64];
    CHECK(calm_set("test_policy", "adaptive") == 0);
    CHECK_EQUAL(calm_get("test_policy", value, sizeof value), 8);
    CHECK(strcmp(value, "adaptive") == 0);
    memset(value, 'x', sizeof value);
    CHECK_EQUAL(calm_get("test_policy", value, 4), 8);
    CHECK(strcmp(value, "ada") == 0 && value[4] == 'x');
    CHECK_EQUAL(calm_get("test_policy", NULL, 0), 8);
    const char *unknown[] = {"",        "misus",  "misusee", "MISUSE", "misuse=", "misuse=warn",
                             " misuse", "policy", "a\nb"};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        errno = 0;
        CHECK(calm_get(unknown[i], value, sizeof value) == -1 && errno == ENOENT);
        errno = 0;
        CHECK(calm_set(unknown[i], "on") == -1 && errno == ENOENT);
    }
}

static const struct {
    const char *name;
    bool always; /* may be set at any time */
    const char *good[4];
    const char *bad[8];
} options[] = {
    {"test_policy", true, {"paper", "adaptive"}, {"", "on", "Paper", "paper ", "adaptiv", "0"}},
    {"background", false, {"off", "on"}, {"", "yes", "1", "ON", "offf"}},
    {"test_cache", false, {"auto", "locked", "off"}, {"", "on", "rseq ", "Locked", "0"}},
    {"misuse", true, {"warn", "abort"}, {"", "ignore", "WARN", "0"}},
    {"memory_per_cpu",
     true,
     {"0", "200", "8"},
     {"", "-1", "abc", "10x", " 10", "99999999999999999999", "1e3"}},
    {"memory_per_cpu", false, {"auto", "auto", "auto"}, {"AUTO", "auto "}},
    {"test_cgroup", false, {"off", "on"}, {"", "yes", "2"}},
    {"huge_pages", false, {"never", "earned"}, {"", "always", "on"}},
    {"vectored_purge", false, {"off", "auto"}, {"", "yes", "3"}},
    {"report", false, {"exit", "off"}, {"", "on", "json"}},
};

static void set_and_get(const char *unused) {
    (void)unused;
    void *block = malloc(100);
    free(block);
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        char before[64];
        snprintf(before, sizeof before, "%s", get(options[i].name));
        for (size_t j = 0; j < 8 && options[i].bad[j] != NULL; j++) {
            errno = 0;
            int done = calm_set(options[i].name, options[i].bad[j]);
            if (done != -1 || errno != EINVAL) {
                fprintf(stderr, "%s=%s gives %d, errno %d\n", options[i].name, options[i].bad[j], done,
                        errno);
                _Exit(1);
            }
            CHECK(strcmp(get(options[i].name), before) == 0);
        }
        bool fixed = false;
        for (size_t j = 0; j < 4 && options[i].good[j] != NULL; j++) {
            errno = UNTOUCHED;
            int done = calm_set(options[i].name, options[i].good[j]);
            if (done == 0) {
                CHECK(strcmp(get(options[i].name), options[i].good[j]) == 0);
                CHECK_EQUAL(errno, UNTOUCHED);
            } else {
                if (done != -1 || errno != EBUSY || options[i].always) {
                    fprintf(stderr, "%s=%s gives %d, errno %d\n", options[i].name, options[i].good[j], done,
                            errno);
                    _Exit(1);
                }
                fixed = true;
                CHECK(strcmp(get(options[i].name), before) == 0);
            }
        }
        say(options[i].name, fixed);
        /* What is set while it runs must not break it. */
        block = malloc(1000 + i);
        use_all(block, 1000 + i);
        free(block);
    }
    CHECK(calm_set("report", "off") == 0 || errno == EBUSY);
}

/* The limit follows the price of memory. */
static void price_scales(const char *unused) {
    (void)unused;
    void *block = malloc(50 * MIB);
    CHECK(block != NULL);
    memset(block, 1, 50 * MIB);
    CHECK(calm_set("memory_per_cpu", "8") == 0);
    uint64_t once = stats_now().dirty_limit;
    CHECK(calm_set("memory_per_cpu", "48") == 0);
    uint64_t thrice = stats_now().dirty_limit;
    CHECK_ACCOUNT(thrice > 2 * once && thrice < 4 * once);
    free(block);
}

static void trim_gives(const char *unused) {
    (void)unused;
    enum { BLOCKS = 160 };
    void *blocks[BLOCKS];
    CHECK(calm_set("memory_per_cpu", "1600") == 0);
    calm_trim(0);
    size_t before = resident_bytes();
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(100 * KIB);
        CHECK(blocks[i] != NULL);
        memset(blocks[i], 1, 100 * KIB);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        free(blocks[i]);
    }
    /* A server may have the last of them later. */
    WAIT_UNTIL(stats_now().dirty >= 15 * MIB || stats_now().purges_epoch > 0);
    struct calm_stats first = stats_now();
    CHECK_ACCOUNT(first.dirty >= 15 * MIB);
    size_t given = calm_trim(4 * MIB);
    struct calm_stats second = stats_now();
    CHECK_ACCOUNT(given == second.purged - first.purged);
    CHECK_ACCOUNT(given >= 11 * MIB && given <= 17 * MIB);
    CHECK_ACCOUNT(second.dirty <= 4 * MIB && second.dirty >= 3 * MIB);
    CHECK_ACCOUNT(second.purges_request == first.purges_request + 1);
    CHECK_ACCOUNT(second.purges_limit == first.purges_limit);
    given = calm_trim(0);
    CHECK_ACCOUNT(given >= 3 * MIB && given <= 5 * MIB);
    CHECK_ACCOUNT(stats_now().dirty == 0);
    CHECK_ACCOUNT(stats_now().cached == 0);
    CHECK_ACCOUNT(grown_since(before) <= MIB + 32 * (size_t)sysconf(_SC_PAGESIZE));
    errno = UNTOUCHED;
    CHECK_EQUAL(calm_trim(0), 0);
    CHECK_EQUAL(errno, UNTOUCHED);
}

/* Small blocks, in caches and in slabs that are part used. */
static void trim_gives_small(const char *unused) {
    (void)unused;
    enum { BLOCKS = 200000 };
    unsigned char **blocks = own_pages(BLOCKS * sizeof *blocks);
    CHECK(calm_set("memory_per_cpu", "1600") == 0);
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(100);
        CHECK(blocks[i] != NULL);
        fill(blocks[i], 100, i);
    }
    size_t before = resident_bytes();
    uint64_t in_use = stats_now().in_use;
    /* One block in 2,000 keeps its page. */
    for (size_t i = 0; i < BLOCKS; i++) {
        if (i % 2000 != 0) {
            free(blocks[i]);
            blocks[i] = NULL;
        }
    }
    CHECK_ACCOUNT(calm_trim(0) >= 15 * MIB);
    CHECK_ACCOUNT(before - resident_bytes() >= 15 * MIB);
    CHECK_ACCOUNT(stats_now().in_use <= in_use - 15 * MIB);
    for (size_t i = 0; i < BLOCKS; i += 2000) {
        CHECK(is_filled(blocks[i], 100, i));
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        if (blocks[i] == NULL) {
            blocks[i] = malloc(100);
            CHECK(blocks[i] != NULL);
            fill(blocks[i], 100, i);
        }
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        CHECK(is_filled(blocks[i], 100, i));
        free(blocks[i]);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"page-size", page_size},
        {"zero-bytes", zero_bytes},
        {"huge-sizes", huge_sizes},
        {"products", products},
        {"huge-alignments", huge_alignments},
        {"realloc-null", realloc_null},
        {"realloc-zero", realloc_zero},
        {"realloc-fails-softly", realloc_fails_softly},
        {"posix-memalign-refuses", posix_memalign_refuses},
        {"posix-memalign-grants", posix_memalign_grants},
        {"posix-memalign-fails", posix_memalign_fails},
        {"more-than-memory", more_than_memory},
        {"grows-within-a-limit", grows_within_a_limit},
        {"aligned-alloc", aligned_alloc_all},
        {"usable-sizes", usable_sizes},
        {"sized-frees", sized_frees},
        {"aligned-sized-frees", aligned_sized_frees},
        {"errno", errno_is_kept},
#ifdef __GLIBC__
        {"old-aligned", old_aligned},
        {"libc-names", libc_names},
        {"trim", trim_all},
        {"mallinfo", mallinfo_counts},
        {"malloc-info", malloc_info_to},
        {"malloc-stats", malloc_stats_shows},
        {"mallopt", mallopt_takes},
        {"with-libc", with_libc},
        {"names", names_are_ours},
#endif
        {"calm-family", calm_family},
        {"calm-stats-sizes", stats_sizes},
        {"calm-stats-count", stats_count},
        {"calm-stats-json", stats_json},
        {"calm-get", get_as_snprintf},
        {"calm-set", set_and_get},
        {"calm-price", price_scales},
        {"calm-trim", trim_gives},
        {"calm-trim-small", trim_gives_small},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
