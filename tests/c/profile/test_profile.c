/*
 * The parts of the heap profile: the arithmetic compared with the math library, the unwinder with the
 * compiler's own, the table, and the file parsed as protobuf; and all together, by calm_malloc, while
 * threads allocate, profiling is switched, and the process forks.
 */
#include "calmalloc.h"
#include "check.h"

#include "os/random.h"
#include "profile/pprof.h"
#include "profile/sampling.h"
#include "profile/unwind.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static uint64_t random_state;

static uint64_t next_random(void) {
    return check_random(&random_state);
}

/* --- sampling --- */

static void test_weights(void) {
    const uint64_t means[] = {1, 1000, (uint64_t)64 << 10, (uint64_t)512 << 10, (uint64_t)1 << 30};
    const uint64_t sizes[] = {1, 16, 100, 1000, 4096, 100000, (uint64_t)1 << 20, (uint64_t)1 << 40};
    for (size_t i = 0; i < sizeof means / sizeof means[0]; i++) {
        for (size_t j = 0; j < sizeof sizes / sizeof sizes[0]; j++) {
            double wanted = -1 / expm1(-(double)sizes[j] / (double)means[i]);
            struct sample_weight weight = sampling_weight(sizes[j], means[i]);
            CHECK(fabs((double)weight.count - wanted * SAMPLE_COUNT_UNIT) <=
                  0.51 + 1e-9 * wanted * SAMPLE_COUNT_UNIT);
            CHECK(fabs((double)weight.bytes - wanted * (double)sizes[j]) <=
                  0.51 + 1e-9 * wanted * (double)sizes[j]);
        }
    }
}

static void test_gaps(void) {
    const uint64_t mean = 100000;
    const int draws = 1000000;
    double sum = 0;
    int above_mean = 0;
    int below_hundredth = 0;
    for (int i = 0; i < draws; i++) {
        int64_t gap = sampling_gap(random_mix((uint64_t)i * RANDOM_GOLDEN_RATIO), mean);
        CHECK(gap >= 1);
        sum += (double)gap;
        above_mean += gap > (int64_t)mean;
        below_hundredth += gap <= (int64_t)mean / 100;
    }
    CHECK(fabs(sum / draws / (double)mean - 1) < 0.005);
    CHECK(fabs((double)above_mean / draws - exp(-1)) < 0.003);
    CHECK(fabs((double)below_hundredth / draws + expm1(-0.01)) < 0.001);
    /* The whole range of what may come. */
    CHECK_EQUAL(sampling_gap(UINT64_MAX, mean), 1);
    CHECK(fabs((double)sampling_gap(0, mean) - 53 * log(2) * (double)mean) < 2);
}

/* --- the unwinder --- */

#define DEEP 100

#if defined(__GLIBC__)
#include <execinfo.h>

struct trace {
    uintptr_t ours[DEEP];
    void *theirs[DEEP];
    size_t our_count;
    size_t their_count;
};

/* Both from the same place: all but their innermost entries must be the same. A sanitizer's backtrace has a
 * frame of its own. */
static __attribute__((noinline)) void take(struct trace *trace) {
    trace->our_count = unwind_here(trace->ours, DEEP);
    trace->their_count = (size_t)backtrace(trace->theirs, DEEP);
}

static void check_same(const struct trace *trace, size_t least, bool struck) {
    CHECK(trace->our_count >= least);
    CHECK(SANITIZED || trace->our_count == trace->their_count);
    for (size_t i = 1; i < trace->our_count; i++) {
        uintptr_t ours = trace->ours[trace->our_count - i];
        uintptr_t theirs = (uintptr_t)trace->theirs[trace->their_count - i];
        /* What a signal struck is meant itself, not what is before it: ours says so by one more. */
        CHECK(ours == theirs || (struck && ours == theirs + 1));
    }
}

static struct trace found;

static __attribute__((noinline)) int recurse(int depth) {
    if (depth == 0) {
        take(&found);
        return 0;
    }
    int below = recurse(depth - 1);
    __asm__ volatile("" : "+r"(below)); /* or the compiler makes a loop of it */
    return 1 + below;
}

/* With a frame whose size no table knows: found by rbp. */
static __attribute__((noinline)) int with_variable_frame(size_t bytes) {
    volatile char *room = __builtin_alloca(bytes);
    room[bytes - 1] = 1;
    return recurse(3) + room[bytes - 1];
}

static int compare_and_take(const void *a, const void *b) {
    take(&found);
    return *(const int *)a - *(const int *)b;
}

static void *in_thread(void *argument) {
    recurse(5);
    return argument;
}

static void handle(int number) {
    (void)number;
    recurse(2);
}

static void test_unwinder(void) {
    void *prime[4];
    backtrace(prime, 4);

    /* A compiler may split the function in two, of which the second calls itself. */
    CHECK(recurse(1) == 1);
    check_same(&found, 3, false);
    size_t base = found.our_count;
    CHECK(recurse(31) == 31);
    check_same(&found, 30, false);
    CHECK_EQUAL(found.our_count, base + 30);
    CHECK(with_variable_frame(5000) == 4);
    check_same(&found, 6, false);
    int numbers[] = {3, 1, 2};
    qsort(numbers, 3, sizeof numbers[0], compare_and_take);
    check_same(&found, 5, false);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, in_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    check_same(&found, 7, false);

    /* Through the frame that the kernel made, also from one stack to another. */
    static char other_stack[1 << 16];
    stack_t other = {.ss_sp = other_stack, .ss_size = sizeof other_stack};
    CHECK(sigaltstack(&other, NULL) == 0);
    for (int flags = 0; flags <= SA_ONSTACK; flags += SA_ONSTACK) {
        struct sigaction action = {.sa_handler = handle, .sa_flags = flags};
        CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
        CHECK(raise(SIGUSR1) == 0);
        if (!SANITIZED) { /* which come between */
            check_same(&found, 6, true);
        }
        CHECK(found.our_count >= 6);
    }

    /* No more than there is room for. */
    uintptr_t few[3];
    CHECK_EQUAL(unwind_here(few, 3), 3);
    CHECK_EQUAL(unwind_here(few, 0), 0);
}
#else /* no backtrace to compare with */
static void test_unwinder(void) {
}
#endif

#if defined(__x86_64__)
/* Calls unwind_here with the rule that linkers write for their stubs: the frame begins 8 bytes above the
 * stack pointer, and 8 more from the eleventh byte of each 16 on. */
__asm__(".text\n"
        ".balign 16\n"
        ".globl call_as_stub\n"
        ".type call_as_stub, @function\n"
        "call_as_stub:\n\t"
        ".cfi_startproc\n\t"
        ".cfi_escape 0x0f, 11, 0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22\n\t"
        "pushq %rdi\n\t"
        ".byte 0x0f, 0x1f, 0x44, 0, 0\n\t"
        "call unwind_here\n\t" /* returns to the eleventh byte */
        "popq %rdi\n\t"
        "ret\n\t"
        ".cfi_endproc\n"
        ".size call_as_stub, . - call_as_stub\n");
size_t call_as_stub(uintptr_t *addresses, size_t most);

static void test_stub(void) {
    uintptr_t direct[DEEP], by_stub[DEEP];
    size_t count = unwind_here(direct, DEEP);
    CHECK_EQUAL(call_as_stub(by_stub, DEEP), count + 1);
    CHECK(memcmp(&by_stub[2], &direct[1], (count - 1) * sizeof *direct) == 0);
}

/* Calls unwind_here without tables that tell of it, with a frame pointer of the test's choice. */
__asm__(".text\n"
        ".globl call_astray\n"
        ".type call_astray, @function\n"
        "call_astray:\n\t"
        "pushq %rbp\n\t"
        "movq %rdx, %rbp\n\t"
        "call unwind_here\n\t"
        "popq %rbp\n\t"
        "ret\n"
        ".size call_astray, . - call_astray\n");
size_t call_astray(uintptr_t *addresses, size_t most, uintptr_t frame_pointer);

/* Whatever is in the registers, it ends, and touches nothing that is not there. */
static void test_astray(void) {
    uintptr_t addresses[DEEP];
    char *hole = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(hole != MAP_FAILED);
    CHECK(mprotect(hole + 4096, 4096, PROT_NONE) == 0);
    uintptr_t here = (uintptr_t)__builtin_frame_address(0);
    uintptr_t loop[2] = {(uintptr_t)loop, (uintptr_t)call_astray};
    const uintptr_t frames[] = {0,
                                1,
                                8,
                                (uintptr_t)hole + 4096,
                                (uintptr_t)hole + 4096 - 8,
                                here & ~(uintptr_t)15,
                                here | 3,
                                here + 4096,
                                here + ((uintptr_t)8 << 20),
                                here - 4096,
                                (uintptr_t)loop,
                                (uintptr_t)1 << 63,
                                UINTPTR_MAX,
                                UINTPTR_MAX - 7};
    for (size_t i = 0; i < sizeof frames / sizeof frames[0]; i++) {
        size_t count = call_astray(addresses, DEEP, frames[i]);
        CHECK(count >= 1 && count <= DEEP);
    }
}
#else
static void test_stub(void) {
}

static void test_astray(void) {
}
#endif

/* --- the file --- */

struct parsed {
    unsigned char bytes[1 << 22];
    size_t length;
    uint64_t values[8]; /* sums over all samples */
    size_t samples;
    size_t mappings;
    size_t build_ids;
    size_t locations;
    size_t strings;
    uint64_t period;
    uint64_t default_type;
    size_t deepest;
    uint64_t location[1 << 16];
};

static uint64_t number_at(const unsigned char **at, const unsigned char *end) {
    uint64_t number = 0;
    for (unsigned shift = 0;; shift += 7) {
        CHECK(*at < end && shift < 64);
        number |= (uint64_t)(**at & 0x7f) << shift;
        if ((*(*at)++ & 0x80) == 0) {
            return number;
        }
    }
}

static bool is_known_location(const struct parsed *profile, uint64_t id) {
    for (size_t i = 0; i < profile->locations; i++) {
        if (profile->location[i] == id) {
            return true;
        }
    }
    return false;
}

static void parse_message(struct parsed *profile, unsigned kind, const unsigned char *at,
                          const unsigned char *end) {
    size_t values = 0;
    size_t depth = 0;
    while (at < end) {
        uint64_t tag = number_at(&at, end);
        CHECK_EQUAL(tag & 7, 0);
        uint64_t value = number_at(&at, end);
        unsigned field = (unsigned)(tag >> 3);
        if (kind == 2 && field == 2) {
            CHECK(values < 8);
            profile->values[values++] += value;
        } else if (kind == 2 && field == 1) {
            CHECK(is_known_location(profile, value));
            depth++;
        } else if (kind == 4 && field == 1) {
            CHECK(value != 0 && !is_known_location(profile, value));
            CHECK(profile->locations < sizeof profile->location / sizeof profile->location[0]);
            profile->location[profile->locations++] = value;
        } else if (kind == 4 && field == 2) {
            CHECK(value >= 1 && value <= profile->mappings);
        } else if (kind == 3 && field >= 5) {
            CHECK(value < profile->strings);
            profile->build_ids += field == 6;
        }
    }
    CHECK(kind != 2 || values == 8);
    profile->deepest = depth > profile->deepest ? depth : profile->deepest;
}

/* Samples are looked at last: what they name comes behind them. */
static void parse(struct parsed *profile, const char *path) {
    memset(profile, 0, sizeof *profile);
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    profile->length = fread(profile->bytes, 1, sizeof profile->bytes, file);
    CHECK(profile->length < sizeof profile->bytes);
    fclose(file);
    const unsigned char *end = profile->bytes + profile->length;
    for (int pass = 0; pass < 3; pass++) {
        for (const unsigned char *at = profile->bytes; at < end;) {
            uint64_t tag = number_at(&at, end);
            unsigned field = (unsigned)(tag >> 3);
            uint64_t number = number_at(&at, end);
            if ((tag & 7) == 0) {
                profile->period = field == 12 ? number : profile->period;
                profile->default_type = field == 14 ? number : profile->default_type;
                continue;
            }
            CHECK_EQUAL(tag & 7, 2);
            CHECK(number <= (size_t)(end - at));
            if (pass == 0) {
                profile->samples += field == 2;
                profile->mappings += field == 3;
                CHECK(field != 6 || profile->strings > 0 || number == 0); /* the first is empty */
                profile->strings += field == 6;
            } else if (field == (pass == 1 ? 4 : 2) || (pass == 1 && field == 3)) {
                parse_message(profile, field, at, at + number);
            }
            at += number;
        }
    }
}

static struct parsed profile;

static const char *write_and_parse(void) {
    static char path[] = "/tmp/test_profile.XXXXXX";
    memcpy(path + sizeof path - 7, "XXXXXX", 6);
    int file = mkstemp(path);
    CHECK(file >= 0);
    close(file);
    CHECK(calm_profile_write(path) == 0);
    parse(&profile, path);
    CHECK(unlink(path) == 0);
    return path;
}

static void test_table_and_file(void) {
    static struct samples samples;
    CHECK(samples_init(&samples));
    static char blocks[1000];
    uintptr_t stack[MAX_SAMPLE_DEPTH];
    for (size_t i = 0; i < MAX_SAMPLE_DEPTH; i++) {
        stack[i] = UINTPTR_MAX - i; /* whose numbers are the longest to write */
    }
    for (size_t i = 0; i < sizeof blocks; i++) {
        struct sample_weight weight = {.count = 3 * SAMPLE_COUNT_UNIT, .bytes = 100};
        stack[0] = 1000 + i % 7;
        samples_add(&samples, &blocks[i], weight, stack, 1 + i % MAX_SAMPLE_DEPTH, i);
    }
    for (size_t i = 0; i < sizeof blocks; i += 2) {
        samples_remove(&samples, &blocks[i], i + 1000);
        samples_remove(&samples, &blocks[i], i + 1000); /* unknown by now */
    }
    char path[] = "/tmp/test_profile.XXXXXX";
    int file = mkstemp(path);
    CHECK(file >= 0);
    close(file);
    CHECK_EQUAL(pprof_write(&samples, 12345, path, false), 0);
    parse(&profile, path);
    CHECK_EQUAL(profile.samples, 7 * MAX_SAMPLE_DEPTH);
    CHECK_EQUAL(profile.values[0], 3000);
    CHECK_EQUAL(profile.values[1], 100000);
    CHECK_EQUAL(profile.values[2], 1500);
    CHECK_EQUAL(profile.values[3], 50000);
    CHECK_EQUAL(profile.values[4], 3000);
    CHECK_EQUAL(profile.values[5], 100000);
    CHECK_EQUAL(profile.values[6], 1500 * 1000);
    CHECK_EQUAL(profile.deepest, MAX_SAMPLE_DEPTH);
    CHECK_EQUAL(profile.locations, 7 + MAX_SAMPLE_DEPTH - 1);
    CHECK_EQUAL(profile.period, 12345);
    CHECK(profile.mappings > 0 && profile.build_ids > 0);
    CHECK(profile.default_type > 0 && profile.default_type < profile.strings);
    /* A link or file in the way stays, and so does what the link names. */
    char link[64];
    struct stat victim;
    snprintf(link, sizeof link, "%s.link", path);
    CHECK(truncate(path, 3) == 0 && symlink(path, link) == 0);
    CHECK_EQUAL(pprof_write(&samples, 1, link, true), EEXIST);
    CHECK_EQUAL(pprof_write(&samples, 1, path, true), EEXIST);
    CHECK(stat(path, &victim) == 0 && victim.st_size == 3);
    CHECK(lstat(link, &victim) == 0 && S_ISLNK(victim.st_mode));
    CHECK(unlink(path) == 0);
    CHECK_EQUAL(pprof_write(&samples, 1, link, true), EEXIST); /* which now leads nowhere */
    CHECK(unlink(link) == 0);
    CHECK_EQUAL(pprof_write(&samples, 1, path, true), 0);
    CHECK(lstat(path, &victim) == 0 && S_ISREG(victim.st_mode) && victim.st_size > 3);
    CHECK(unlink(path) == 0);
    CHECK_EQUAL(pprof_write(&samples, 1, "/nonexistent/profile", true), ENOENT);
    CHECK_EQUAL(pprof_write(&samples, 1, "/dev/full", false), ENOSPC);

    /* As many as there is room for: the rest is counted, and room comes back. */
    static char many[MAX_SAMPLE_BLOCKS];
    struct sample_weight one = {.count = SAMPLE_COUNT_UNIT, .bytes = 1};
    for (size_t i = 0; i < sizeof many; i++) {
        samples_add(&samples, &many[i], one, stack, 5, 0);
    }
    CHECK(!samples_have_room(&samples));
    CHECK(samples.dropped > 0 && samples.live == MAX_SAMPLE_BLOCKS - 1);
    for (size_t i = 0; i < sizeof many; i++) {
        samples_remove(&samples, &many[i], 0);
    }
    CHECK(samples_have_room(&samples));
    CHECK_EQUAL(samples.live, 500);
}

static struct sample_sums sums_of(struct samples *samples, size_t stack, uint64_t now_ns) {
    const uintptr_t *addresses;
    size_t depth;
    struct sample_sums sums = samples_read(samples, stack, now_ns, &addresses, &depth);
    CHECK_EQUAL(addresses[0], stack); /* as the stacks of these tests begin */
    return sums;
}

/* A stack whose blocks live for 10 ns, and one whose blocks stay. */
static void test_lifetimes(void) {
    static struct samples samples;
    CHECK(samples_init(&samples));
    static char blocks[100];
    const uintptr_t brief[] = {1};
    const uintptr_t lasting[] = {2};
    struct sample_weight weight = {.count = 3 * SAMPLE_COUNT_UNIT, .bytes = 300};
    uint64_t now_ns = 1000000;
    for (size_t i = 0; i < sizeof blocks; i += 2) {
        samples_add(&samples, &blocks[i], weight, brief, 1, now_ns);
        samples_add(&samples, &blocks[i + 1], weight, lasting, 1, now_ns);
        now_ns += 10;
        samples_remove(&samples, &blocks[i], now_ns);
    }
    struct sample_sums sums = sums_of(&samples, 1, now_ns);
    CHECK_EQUAL(sums.lifetime_ns, 50 * 3 * 10);
    CHECK_EQUAL(sums.age_ns, 0);
    CHECK_EQUAL(sums.in_use.count, 0);
    sums = sums_of(&samples, 2, now_ns + 5);
    CHECK_EQUAL(sums.lifetime_ns, 0);
    CHECK_EQUAL(sums.age_ns, 3 * (50 * 5 + 10 * (50 * 51 / 2)));
    /* Of another CPU's clock, which is behind: no time has passed. */
    samples_remove(&samples, &blocks[1], 0);
    CHECK_EQUAL(sums_of(&samples, 2, now_ns).lifetime_ns, 0);
    CHECK_EQUAL(sums_of(&samples, 2, 0).age_ns, 0);
}

/* Sums at the peak, against a copy of all sums made at each new peak. */
static void test_peak(void) {
    enum { STACKS = 20, BLOCKS = 400, STEPS = 200000 };
    static struct samples samples;
    CHECK(samples_init(&samples));
    static char blocks[BLOCKS];
    static uint64_t size[BLOCKS];
    static uint64_t in_use[STACKS + 1];
    static uint64_t at_peak[STACKS + 1];
    uint64_t total = 0;
    uint64_t peak = 0;
    uint64_t peak_ns = 0;
    for (uintptr_t i = 1; i <= STACKS; i++) { /* so that their numbers are known */
        samples_add(&samples, &blocks[0], (struct sample_weight){0}, &i, 1, 0);
        samples_remove(&samples, &blocks[0], 0);
    }
    for (uint64_t step = 1; step <= STEPS; step++) {
        size_t which = next_random() % BLOCKS;
        uintptr_t stack = 1 + which % STACKS;
        if (size[which] == 0) {
            size[which] = 1 + next_random() % 1000;
            in_use[stack] += size[which];
            total += size[which];
            samples_add(&samples, &blocks[which], (struct sample_weight){1, size[which]}, &stack, 1, step);
        } else {
            samples_remove(&samples, &blocks[which], step);
            in_use[stack] -= size[which];
            total -= size[which];
            size[which] = 0;
        }
        if (total > peak) {
            peak = total;
            peak_ns = step;
            memcpy(at_peak, in_use, sizeof at_peak);
        }
        for (size_t i = 1; step % 97 == 0 && i <= STACKS; i++) {
            struct sample_sums sums = sums_of(&samples, i, step);
            CHECK_EQUAL(sums.at_peak.bytes, at_peak[i]);
            CHECK_EQUAL(sums.in_use.bytes, in_use[i]);
        }
        CHECK(samples.peak_bytes == peak && samples.peak_ns == peak_ns && samples.in_use_bytes == total);
    }
    CHECK(peak > total);
}

/* --- by calm_malloc --- */

/* What runs ahead of the first time that the option is set. */
static void test_off(void) {
    char text[16];
    CHECK(calm_get("profile", text, sizeof text) == 1 && strcmp(text, "0") == 0);
    CHECK(calm_profile_write("/tmp/never") == -1 && errno == ENODATA);
    CHECK(calm_profile_write(NULL) == -1 && errno == EINVAL);
    const char *bad[] = {"", "k", "1kk", "-1", "2g", "1t", "1.5m", "99999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(calm_set("profile", bad[i]) == -1 && errno == EINVAL);
    }
    CHECK(calm_set("profile_file", "x") == -1 && errno == EBUSY);
}

static void test_estimate(void) {
    CHECK(calm_set("profile", "32k") == 0);
    char text[16];
    CHECK(calm_get("profile", text, sizeof text) == 5 && strcmp(text, "32768") == 0);
    const int count = 1000000;
    const int max_kept = 1000;
    static void *kept[1000];
    double bytes = 0;
    for (int i = 0; i < count; i++) {
        size_t size = 1 + next_random() % 1000;
        void **slot = &kept[next_random() % (unsigned)max_kept];
        calm_free(*slot);
        *slot = calm_malloc(size);
        CHECK(*slot != NULL && calm_malloc_usable_size(*slot) >= size);
        memset(*slot, 1, size);
        bytes += (double)size;
    }
    write_and_parse();
    CHECK(fabs((double)profile.values[0] / count - 1) < 0.1);
    CHECK(fabs((double)profile.values[1] / bytes - 1) < 0.05);
    CHECK(profile.values[2] < (uint64_t)max_kept * 5);
    for (int i = 0; i < max_kept; i++) {
        calm_free(kept[i]);
        kept[i] = NULL;
    }
    write_and_parse();
    CHECK_EQUAL(profile.values[2], 0);
    CHECK_EQUAL(profile.values[3], 0);
    CHECK(profile.values[0] > 0);
    CHECK(calm_set("profile", "0") == 0);
}

static void check_bytes(const unsigned char *block, size_t count, unsigned char byte) {
    for (size_t i = 0; i < count; i++) {
        CHECK(block[i] == byte);
    }
}

/* Each block is sampled: all that can be asked of one must hold of a run of pages, too. */
static void test_all_sampled(void) {
    CHECK(calm_set("profile", "1") == 0);
    for (size_t size = 0; size < 70000; size += size < 100 ? 1 : 997) {
        unsigned char *block = calm_malloc(size);
        CHECK(block != NULL && calm_malloc_usable_size(block) >= size);
        memset(block, 7, size);
        block = calm_realloc(block, size + 100);
        CHECK(block != NULL && calm_malloc_usable_size(block) >= size + 100);
        check_bytes(block, size, 7);
        block = calm_realloc(block, size * 3 + 1);
        CHECK(block != NULL);
        check_bytes(block, size, 7);
        block = calm_realloc(block, size / 2 + 1);
        CHECK(block != NULL);
        check_bytes(block, size / 2, 7);
        calm_free(block);
        block = calm_calloc(1, size);
        CHECK(block != NULL);
        check_bytes(block, size, 0);
        calm_free(block);
        for (size_t alignment = 8; alignment <= 65536; alignment *= 2) {
            void *aligned;
            CHECK(calm_posix_memalign(&aligned, alignment, size) == 0);
            CHECK((uintptr_t)aligned % alignment == 0 && calm_malloc_usable_size(aligned) >= size);
            memset(aligned, 9, size);
            calm_free(aligned);
        }
    }
    volatile size_t too_large = SIZE_MAX;
    CHECK(calm_malloc(too_large) == NULL && errno == ENOMEM);
    too_large = PTRDIFF_MAX;
    CHECK(calm_malloc(too_large) == NULL && errno == ENOMEM);

    /* One that lives while profiling ends is still followed. */
    void *last = calm_malloc(100);
    CHECK(calm_set("profile", "0") == 0);
    write_and_parse();
    CHECK(profile.values[2] > 0 && profile.values[3] >= 100);
    calm_free(last);
    write_and_parse();
    CHECK_EQUAL(profile.values[2], 0);
    CHECK_EQUAL(profile.values[3], 0);
}

#define WORKERS 4

static _Atomic(bool) stop;

static void *work(void *argument) {
    uint64_t state = (uint64_t)(uintptr_t)argument * 0x9e3779b97f4a7c15ULL + 1;
    void *held[64] = {0};
    while (!atomic_load(&stop)) {
        state = random_mix(state + RANDOM_GOLDEN_RATIO);
        void **slot = &held[state % 64];
        size_t size = state >> 20 & ((state >> 8 & 15) == 0 ? 0x3ffff : 0x7ff);
        if ((state >> 12 & 3) == 0) {
            *slot = calm_realloc(*slot, size + 1);
        } else {
            calm_free(*slot);
            *slot = calm_malloc(size);
        }
        CHECK(*slot != NULL);
        memset(*slot, 1, size);
    }
    for (size_t i = 0; i < 64; i++) {
        calm_free(held[i]);
    }
    return NULL;
}

/* In the child the profile goes on from where it was. */
static void fork_and_go_on(void) {
#if defined(__SANITIZE_THREAD__)
    return; /* whose runtime does not like forks of programs with threads */
#endif
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(calm_set("profile", "100") == 0);
        for (int i = 0; i < 1000; i++) {
            calm_free(calm_malloc(100));
        }
        write_and_parse();
        CHECK(profile.values[0] > 500);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_threads(void) {
#if defined(__SANITIZE_THREAD__)
    CHECK(calm_set("background", "off") == 0); /* a bare thread, without what the runtime keeps for each */
#endif
    pthread_t threads[WORKERS];
    for (size_t i = 0; i < WORKERS; i++) {
        CHECK(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    }
    const char *means[] = {"1000", "0", "64k", "100", "0", "5000"};
    for (int i = 0; i < 60; i++) {
        CHECK(calm_set("profile", means[i % 6]) == 0);
        check_nap(10000000);
        if (i % 7 == 0) {
            write_and_parse();
        }
        if (i % 10 == 0) {
            fork_and_go_on();
        }
    }
    atomic_store(&stop, true);
    for (size_t i = 0; i < WORKERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK(calm_set("profile", "0") == 0);
    write_and_parse();
    CHECK(profile.values[1] > 0);
    CHECK_EQUAL(profile.values[2], 0);
    CHECK_EQUAL(profile.values[3], 0);
}

int main(void) {
    random_state = check_seed(88172645463325252ULL);
    unwind_learn_modules();
    if (!WATCHES_THREADS) {
        test_weights();
        test_gaps();
        test_unwinder();
        test_stub();
        test_astray();
        test_table_and_file();
        test_lifetimes();
        test_peak();
        test_off();
        test_estimate();
        test_all_sampled();
    }
    test_threads();
    printf("profile: ok\n");
    fflush(stdout);
    _exit(0); /* the file at exit is another test's */
}
