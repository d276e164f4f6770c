/*
 * A stream of calls of calm_malloc(3) and its relatives, against a model of the blocks in use, in up to four
 * threads. The input says which thread is next, and only that one runs: real threads, which hand the turn
 * over, so that what depends on a thread is as in a program. The input also sets options, lets time pass and
 * the machine's memory shrink, has the kernel refuse calls, and frees what is no block.
 *
 * Each input finds the allocator as at the start of a process.
 */
#include "calmalloc.h"

#include "api/allocator.h"
#include "api/options.h"
#include "arena/arena.h"
#include "arena/epoch.h"
#include "blocks.h"
#include "check.h"
#include "input.h"
#include "kernel.h"
#include "os/lock.h"
#include "test_clock.h"
#include "walk.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>

#define SLOTS       128
#define MAX_THREADS 4
#define MAX_BYTES   ((size_t)8 << 20) /* of all blocks */
#define MAX_STEPS   4096

static struct block slots[SLOTS];
static bool is_alone;   /* one thread, as the C library says */
static bool is_limited; /* address space */
static size_t misuses, misuses_expected;

/* ---- in place of functions of the allocator's ---- */

void __wrap_misuse_report(const struct misuse_record *misuse);
void __wrap_misuse_report_now(enum misuse kind, const void *pointer);
int __wrap_pthread_atfork(void (*before)(void), void (*parent)(void), void (*child)(void));
uint64_t __wrap_random_process_seed(void);
void __real_cpu_caches_start(struct cpu_caches *caches, enum cache_mode mode);
void __wrap_cpu_caches_start(struct cpu_caches *caches, enum cache_mode mode);

void __wrap_misuse_report_now(enum misuse kind, const void *pointer) {
    if (misuses >= misuses_expected) {
        fprintf(stderr, "unexpected misuse, kind %d, of %p\n", (int)kind, pointer);
        CHECK_FAILED();
    }
    misuses++;
}

void __wrap_misuse_report(const struct misuse_record *misuse) {
    __wrap_misuse_report_now(misuse->kind, misuse->pointer);
}

/* Or each input would add handlers. */
int __wrap_pthread_atfork(void (*before)(void), void (*parent)(void), void (*child)(void)) {
    (void)before, (void)parent, (void)child;
    return 0;
}

uint64_t __wrap_random_process_seed(void) {
    return 1;
}

/* The fuzzer may have a thread, of which the input knows nothing. */
void __wrap_cpu_caches_start(struct cpu_caches *caches, enum cache_mode mode) {
    static const char alone = 1;
    thread_single = is_alone ? &alone : &thread_not_single;
    __real_cpu_caches_start(caches, mode);
}

/* ---- the allocator's start and end ---- */

/* Of a process without CALM_OPTIONS. */
static struct options initial_options;
static struct arena_settings initial_settings;

static void keep_initial(void) {
    static bool kept;
    if (!kept) {
        kept = true;
        CHECK(allocator_ensure_started());
        memcpy(&initial_options, &calm_options, sizeof calm_options);
        memcpy(&initial_settings, &calm_arenas.settings, sizeof initial_settings);
        clock_stop();
        kernel_keep(false);
    }
}

/* As the variables are before the start (api/instance.c). */
static void reset(void) {
    static const struct cpu_caches unready = CPU_CACHES_UNREADY;
    kernel_reset();
    atomic_store(&calm_ready, false);
    memset(&calm_classes, 0, sizeof calm_classes);
    memcpy(&calm_caches, &unready, sizeof unready);
    memcpy(&calm_new_caches, &unready, sizeof unready);
    memset(&calm_arenas, 0, sizeof calm_arenas);
    memcpy(&calm_options, &initial_options, sizeof calm_options);
    memcpy(&calm_arenas.settings, &initial_settings, sizeof initial_settings);
}

static void walk(void) {
    lock_acquire(&calm_arenas.purger.lock);
    if (!kernel_has_lost_pages()) {
        heap_walk(&calm_arenas.of[0].heap, NULL, 0);
    }
    lock_release(&calm_arenas.purger.lock);
}

/* What calmalloc.h promises of the counters between two calls. */
static void check_counters(void) {
    struct calm_stats stats;
    CHECK_EQUAL(calm_stats(&stats, sizeof stats), 0);
    CHECK_EQUAL(stats.footprint, stats.in_use + stats.dirty);
    if (kernel_has_lost_pages()) {
        return;
    }
    CHECK(stats.in_use >= blocks_sum(slots, SLOTS));
    if (kernel_refusals() == 0) {
        CHECK(stats.dirty <= stats.dirty_limit);
        CHECK(stats.cached <= stats.cached_limit);
    }
}

/* ---- the operations ---- */

static struct block *any_slot(struct input *input) {
    return &slots[input_below(input, SLOTS)];
}

/* Whether a call may fail. */
static bool may_fail(void) {
    return is_limited || kernel_refusals() > 0;
}

/* Of what was asked; returns whether there is a block. */
static bool got(void *block) {
    CHECK(block != NULL || may_fail());
    return block != NULL;
}

static size_t read_size(struct input *input) {
    size_t size = input_size(input, 22);
    return blocks_sum(slots, SLOTS) + size <= MAX_BYTES ? size : size % 256;
}

/* All that is usable belongs to the program: little more than `most`. */
static void add_within(struct block *slot, void *start, size_t bytes, size_t most, size_t alignment) {
    size_t usable = calm_malloc_usable_size(start);
    CHECK(usable >= bytes);
    CHECK(usable <= most + most / 2 + ((size_t)64 << 10) + alignment);
    blocks_add(slots, SLOTS, slot, start, usable, alignment > 16 ? alignment : 16);
}

static void add(struct block *slot, void *start, size_t bytes, size_t alignment) {
    add_within(slot, start, bytes, bytes, alignment);
}

static void release_slot(struct block *slot, bool sized) {
    if (slot->start == NULL) {
        return;
    }
    blocks_check(slot, slot->bytes);
    if (sized) {
        calm_free_sized(slot->start, slot->bytes);
    } else {
        calm_free(slot->start);
    }
    slot->start = NULL;
}

static void allocate_some(struct input *input) {
    size_t size = read_size(input);
    size_t count = 1 + input_below(input, 32);
    for (size_t i = 0; i < SLOTS && count > 0; i++) {
        if (slots[i].start == NULL && blocks_sum(slots, SLOTS) + size <= MAX_BYTES) {
            void *block = calm_malloc(size);
            count--;
            if (got(block)) {
                add(&slots[i], block, size, 16);
            }
        }
    }
}

static void allocate_zeroed_one(struct input *input) {
    struct block *slot = any_slot(input);
    size_t size = read_size(input);
    size_t count = 1 + input_below(input, 4);
    release_slot(slot, false);
    unsigned char *block = calm_calloc(count, size / count);
    if (got(block)) {
        size_t usable = calm_malloc_usable_size(block);
        blocks_check_zero(block, size / count * count);
        CHECK(usable >= size / count * count);
        add(slot, block, size / count * count, 16);
    }
}

static void allocate_aligned_one(struct input *input) {
    struct block *slot = any_slot(input);
    size_t size = read_size(input);
    size_t alignment = (size_t)1 << input_below(input, 20);
    release_slot(slot, false);
    void *block = NULL;
    if (alignment >= sizeof(void *) && (size & 1) != 0) {
        int error = calm_posix_memalign(&block, alignment, size);
        CHECK(error == 0 || (error == ENOMEM && may_fail()));
    } else {
        block = calm_aligned_alloc(alignment, size);
    }
    if (got(block)) {
        add(slot, block, size, alignment);
    }
}

static void reallocate_one(struct input *input) {
    struct block *slot = any_slot(input);
    size_t size = read_size(input);
    if (slot->start == NULL) {
        slot->bytes = 0;
    }
    blocks_check(slot, slot->bytes);
    unsigned char *block = calm_realloc(slot->start, size);
    if (size == 0 && slot->start != NULL) {
        CHECK(block == NULL);
        slot->start = NULL;
    } else if (got(block)) {
        struct block moved = *slot;
        moved.start = block;
        blocks_check(&moved, slot->bytes < size ? slot->bytes : size);
        /* A block stays as it is if there is no memory for a shorter one. A block whose pages were moved
         * stays until it shrinks to half. */
        bool is_half = size + 2 * vm_page_size() >= slot->bytes / 2;
        bool stays = block == slot->start && size < slot->bytes && (may_fail() || is_half);
        slot->start = NULL;
        add_within(slot, block, size, stays ? moved.bytes : size, 16);
    } else {
        CHECK(slot->start == NULL || size > slot->bytes); /* to shrink cannot fail */
        blocks_check(slot, slot->bytes);
    }
}

static void free_some(struct input *input) {
    size_t at = input_below(input, SLOTS);
    size_t count = 1 + input_below(input, SLOTS);
    unsigned detail = input_byte(input);
    for (size_t i = 0; i < count; i++, at += 1 + (detail & 7)) {
        release_slot(&slots[at % SLOTS], (detail & 8) != 0);
    }
}

/* Sizes that no allocator has, and alignments that are none. */
static void ask_too_much(struct input *input) {
    static const size_t limits[] = {SIZE_MAX, PTRDIFF_MAX, SIZE_MAX / 2 + 2};
    size_t size = limits[input_below(input, 3)] + 1;
    size = size == 0 ? SIZE_MAX - input_byte(input) : size + input_byte(input);
    struct block *slot = any_slot(input);
    volatile size_t odd = 3 * (size_t)input_byte(input);
    void *block = NULL;
    CHECK(calm_malloc(size) == NULL);
    CHECK(calm_calloc(size, 1 + odd) == NULL);
    CHECK(calm_realloc(slot->start, size) == NULL);
    CHECK(calm_reallocarray(slot->start, size, 2 + odd) == NULL);
    CHECK(calm_aligned_alloc(4096, size) == NULL);
    CHECK(calm_posix_memalign(&block, 64, size) == ENOMEM && block == NULL);
    CHECK(calm_posix_memalign(&block, odd, 1) == EINVAL && block == NULL);
    CHECK(calm_aligned_alloc(odd, 1) == NULL);
}

/* Each is reported once, and changes nothing. */
static void misuse(struct input *input) {
    struct block *slot = any_slot(input);
    size_t inside = input_size(input, 20);
    unsigned detail = input_byte(input);
    char *pointer = (char *)&calm_arenas;
    size_t page = page_bytes(&calm_arenas);
    if (slot->start != NULL && slot->bytes > 1) {
        bool large = heap_class_at(&calm_arenas.of[0].heap, slot->start) == 0;
        pointer = (char *)slot->start + 1 + inside % (slot->bytes - 1);
        /* Within a small block only unaligned ones are known for what they are. */
        pointer = large || (uintptr_t)pointer % 16 != 0 ? pointer : pointer + 1;
    } else if ((detail & 2) != 0) {
        pointer = (char *)(calm_arenas.of[0].heap.space.base + page * inside); /* free, or never used */
        if (heap_class_at(&calm_arenas.of[0].heap, pointer) > 0 ||
            heap_large_span(&calm_arenas.of[0].heap, pointer) != NULL) {
            return;
        }
    }
    bool is_null = pointer == NULL;
    misuses_expected += !is_null;
    if ((detail & 1) == 0) {
        calm_free(pointer);
    } else if (calm_malloc_usable_size(pointer) == 0 && !is_null) {
        CHECK(calm_realloc(pointer, 1 + inside) == NULL);
    } else {
        calm_free(pointer);
    }
    CHECK_EQUAL(misuses, misuses_expected);
}

static void set_option(struct input *input) {
    static const struct {
        const char *name, *value;
    } settings[] = {
        {"memory_per_cpu", "auto"},
        {"memory_per_cpu", "0"},
        {"memory_per_cpu", "1"},
        {"memory_per_cpu", "1000"},
        {"background", "off"},
        {"background", "on"},
        {"huge_pages", "never"},
        {"huge_pages", "earned"},
        {"vectored_purge", "off"},
        {"vectored_purge", "on"},
        {"vectored_purge", "auto"},
        {"test_policy", "adaptive"},
        {"test_policy", "paper"},
        {"test_cgroup", "off"},
        {"test_cgroup", "on"},
        {"test_placement", "off"},
        {"test_placement", "lines"},
        {"test_placement", "colors"},
        {"test_placement", "random"},
#ifdef CALM_PROFILE
        {"profile", "0"},
        {"profile", "1"},
        {"profile", "4k"},
#endif
    };
    size_t which = input_below(input, sizeof settings / sizeof settings[0]);
    /* The profile's tables are of the process, and as large as the machine has CPUs. */
    bool of_profile = strcmp(settings[which].name, "profile") == 0;
    if (of_profile && is_limited) {
        return;
    }
    kernel_keep(of_profile);
    int result = calm_set(settings[which].name, settings[which].value);
    kernel_keep(false);
    CHECK(result == 0 || (errno == ENOMEM && may_fail()));
}

static void other(struct input *input) {
    unsigned detail = input_byte(input);
    char text[256];
    switch (detail % 8) {
    case 0:
    case 1:
        calm_trim(detail < 128 ? 0 : input_size(input, 24));
        break;
    case 2:
        clock_advance(((uint64_t)1 << (detail >> 3)) * 100000);
        clock_use_cpu(input_byte(input) * 100000U, 0);
        break;
    case 3:
        clock_advance(120 * CLOCK_MS);
        epoch_advance(&calm_arenas, false); /* as a helper does */
        break;
    case 4:
        kernel_leave((size_t)1 << (detail >> 3));
        break;
    case 5:
        CHECK(calm_stats_json(text, sizeof text) > 0);
        break;
    case 6:
        arena_trim_by_helper(&calm_arenas, input_size(input, 24));
        break;
    default:
        ask_too_much(input);
    }
}

static void step(struct input *input) {
    switch (input_byte(input) % 16) {
    case 0:
    case 1:
    case 2:
        allocate_some(input);
        break;
    case 3:
        allocate_zeroed_one(input);
        break;
    case 4:
        allocate_aligned_one(input);
        break;
    case 5:
    case 6:
    case 7:
        reallocate_one(input);
        break;
    case 8:
    case 9:
    case 10:
        free_some(input);
        break;
    case 11:
        set_option(input);
        break;
    case 12:
        misuse(input);
        break;
    case 13:
    case 14:
        other(input);
        break;
    default:
        kernel_refuse((uint32_t)input_number(input, 2));
    }
}

/* ---- threads ---- */

/* The first is the caller's. */
static struct worker {
    pthread_t thread;
    sem_t turn;
} workers[MAX_THREADS];
static size_t threads;
static sem_t turn_is_over;
static struct input *shared_input; /* NULL: the thread ends */

static void *work(void *argument) {
    struct worker *worker = argument;
    for (;;) {
        CHECK(sem_wait(&worker->turn) == 0);
        if (shared_input == NULL) {
            return NULL;
        }
        step(shared_input);
        CHECK(sem_post(&turn_is_over) == 0);
    }
}

static void start_threads(size_t count) {
    threads = count;
    for (size_t i = 1; i < count; i++) {
        CHECK(sem_init(&workers[i].turn, 0, 0) == 0);
        CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
}

static void end_threads(void) {
    shared_input = NULL;
    for (size_t i = 1; i < threads; i++) {
        CHECK(sem_post(&workers[i].turn) == 0);
        CHECK(pthread_join(workers[i].thread, NULL) == 0);
    }
}

/* The next operation, in the thread that the input names. */
static void next_step(struct input *input) {
    size_t number = threads == 1 ? 0 : input_below(input, threads);
    if (number == 0) {
        step(input);
        return;
    }
    shared_input = input;
    CHECK(sem_post(&workers[number].turn) == 0);
    CHECK(sem_wait(&turn_is_over) == 0);
}

/* ---- an input ---- */

static void end(void) {
    kernel_refuse(0);
    CHECK_EQUAL(calm_set("profile", "0"), 0);
    for (size_t i = 0; i < SLOTS; i++) {
        release_slot(&slots[i], false);
    }
    walk();
    CHECK_EQUAL(misuses, misuses_expected);
    if (kernel_has_lost_pages()) {
        return;
    }
    calm_trim(0);
    walk();
    struct calm_stats stats;
    CHECK_EQUAL(calm_stats(&stats, sizeof stats), 0);
    CHECK_EQUAL(stats.footprint, 0);
    CHECK_EQUAL(stats.cached, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static const size_t steps_per_walk[] = {1, 4, 16, MAX_STEPS};
    struct input input = {bytes, count};
    keep_initial();
    reset();
    memset(slots, 0, sizeof slots);
    misuses = misuses_expected = 0;
    unsigned detail = input_byte(&input);
    unsigned more = input_byte(&input);
    is_alone = (detail & 3) == 0 && (detail & 4) != 0;
    is_limited = (more & 1) != 0;
    if (is_limited) {
        kernel_limit((size_t)32 << (20 + (more >> 1 & 7)));
    }
    calm_options.test_cache = (int)(detail >> 3 & 3) % 3;
    clock_set_step((more & 16) != 0 ? 1000 : 0);
    clock_set_cpu_step((more & 16) != 0 ? 500 : 0);
    size_t period = steps_per_walk[more >> 6];
    start_threads(1 + (detail & 3));
    if ((detail & 128) != 0) {
        kernel_refuse((uint32_t)input_number(&input, 2));
    }
    if (allocator_ensure_started()) {
        for (size_t i = 1; input.left > 0 && i < MAX_STEPS; i++) {
            next_step(&input);
            check_counters();
            if (i % period == 0) {
                walk();
            }
        }
        end_threads();
        end();
    } else {
        end_threads();
    }
    reset();
    return 0;
}
