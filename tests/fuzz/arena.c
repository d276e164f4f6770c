/*
 * A stream of operations on one arena or several: magazines and large blocks, trims, epochs and settings,
 * each on a CPU of the input's choice. Against a model of the blocks in use; the limit on free memory holds
 * after each operation, unless the kernel has refused a call.
 */
#include "arena/arena.h"
#include "arena/blocks.h"
#include "arena/check.h"
#include "arena/epoch.h"
#include "arena/large.h"
#include "arena/limit.h"
#include "arena/terms.h"
#include "blocks.h"
#include "check.h"
#include "heap/marks.h"
#include "input.h"
#include "kernel.h"
#include "test_clock.h"
#include "walk.h"

#define SLOTS             128
#define MAX_BYTES         ((size_t)8 << 20) /* of all blocks */
#define MAX_STEPS         4096
#define MAX_FUZZED_ARENAS 4

static struct size_classes classes;
static struct cpu_caches caches;
static struct arenas arenas;
static struct block slots[SLOTS];
static size_t page_size;
static unsigned cpu; /* that the caller seems to run on, and so which arena serves it */
static size_t misuses, misuses_expected;
static bool is_limited; /* address space: then it may run out */

uint64_t __wrap_random_process_seed(void);

uint64_t __wrap_random_process_seed(void) {
    return 1;
}

unsigned __wrap_cpu_cache_place(const struct cpu_caches *of);

unsigned __wrap_cpu_cache_place(const struct cpu_caches *of) {
    (void)of;
    return cpu;
}

static void misused(const struct misuse_record *misuse) {
    (void)misuse;
    misuses++;
}

static void walk(void) {
    unsigned number = 0;
    for (const struct arena *arena;
         !kernel_has_lost_pages() && (arena = arena_next(&arenas, &number)) != NULL;) {
        heap_walk(&arena->heap, NULL, 0);
    }
}

static size_t used_in_all(void) {
    size_t used = 0;
    unsigned number = 0;
    for (const struct arena *arena; (arena = arena_next(&arenas, &number)) != NULL;) {
        used += heap_used_pages(&arena->heap);
    }
    return used;
}

static void check_limit(void) {
    CHECK_EQUAL(misuses, misuses_expected);
    if (kernel_refusals() == 0) {
        struct levels totals = totals_now(&arenas);
        CHECK(!is_over(&arenas, totals.dirty, limit_for(&arenas, totals).max));
        CHECK(used_in_all() * page_size >= blocks_sum(slots, SLOTS));
    }
}

static bool may_fail(void) {
    return is_limited || kernel_refusals() > 0;
}

static struct block *any_slot(struct input *input) {
    return &slots[input_below(input, SLOTS)];
}

static bool has_room(size_t bytes) {
    return blocks_sum(slots, SLOTS) + bytes <= MAX_BYTES;
}

static size_t magazine(uint32_t size_class, size_t wanted) {
    size_t batch = classes.of[size_class].batch;
    return 1 + wanted % (batch < MAX_MAGAZINE_BLOCKS ? batch : MAX_MAGAZINE_BLOCKS);
}

static void take_blocks(struct input *input) {
    uint32_t size_class = 1 + (uint32_t)input_below(input, classes.count - 1);
    size_t wanted = magazine(size_class, input_byte(input));
    void *blocks[MAX_MAGAZINE_BLOCKS];
    if (!has_room(wanted * classes.of[size_class].size)) {
        return;
    }
    size_t got = arena_take_blocks(&arenas, size_class, blocks, wanted);
    CHECK(got > 0 || may_fail());
    size_t kept = 0;
    for (size_t i = 0; i < SLOTS && kept < got; i++) {
        if (slots[i].start == NULL) {
            blocks_add(slots, SLOTS, &slots[i], blocks[kept++], classes.of[size_class].size, SIZE_QUANTUM);
            slots[i].size_class = size_class;
        }
    }
    if (kept < got) {
        arena_put_blocks(&arenas, size_class, blocks + kept, got - kept);
    }
}

/* Some blocks of the class of one. */
static void put_blocks(struct input *input) {
    const struct block *first = any_slot(input);
    size_t most = 1 + input_below(input, SLOTS);
    uint32_t size_class = first->size_class;
    void *blocks[MAX_MAGAZINE_BLOCKS];
    size_t count = 0;
    if (first->start == NULL) {
        return;
    }
    for (size_t i = 0; i < SLOTS && count < most; i++) {
        struct block *slot = &slots[i];
        if (slot->start == NULL || slot->size_class != size_class) {
            continue;
        }
        blocks_check(slot, slot->bytes);
        blocks[count++] = slot->start;
        slot->start = NULL;
        if (size_class == 0) {
            arena_put_large(&arenas, blocks[0]);
            return;
        }
        if (count == MAX_MAGAZINE_BLOCKS) {
            break;
        }
    }
    arena_put_blocks(&arenas, size_class, blocks, count);
}

static void take_large(struct input *input) {
    struct block *slot = any_slot(input);
    size_t pages = input_size(input, 10);
    unsigned detail = input_byte(input);
    size_t align_pages = (detail & 4) != 0 ? (size_t)1 << (detail >> 4) % 8 : 1;
    if (slot->start != NULL || pages == 0 || !has_room(pages * page_size)) {
        return;
    }
    bool zero = false;
    void *block = arena_take_large(&arenas, pages, align_pages, (detail & 1) != 0, &zero);
    CHECK(block != NULL || may_fail());
    if (block != NULL) {
        if (zero) {
            blocks_check_zero(block, pages * page_size);
        }
        blocks_add(slots, SLOTS, slot, block, pages * page_size, align_pages * page_size);
        slot->size_class = 0;
    }
}

static void resize_large(struct input *input) {
    struct block *slot = any_slot(input);
    size_t pages = input_size(input, 10);
    if (slot->start == NULL || slot->size_class != 0 || pages == 0 || !has_room(pages * page_size)) {
        return;
    }
    struct span *span = heap_large_span(heap_of(&arenas, slot->start), slot->start);
    CHECK(span != NULL);
    void *resized = arena_resize_large(&arenas, slot->start, pages);
    if (resized == NULL) {
        blocks_check(slot, slot->bytes);
        return;
    }
    struct block moved = *slot;
    moved.start = resized;
    span = heap_large_span(heap_of(&arenas, resized), resized);
    CHECK(span != NULL && span->pages >= pages);
    size_t bytes = span->pages * page_size;
    blocks_check(&moved, bytes < slot->bytes ? bytes : slot->bytes);
    blocks_add(slots, SLOTS, slot, resized, bytes, page_size);
}

static void set_something(struct input *input) {
    static const int prices[] = {MEMORY_PER_CPU_AUTO, MEMORY_PER_CPU_0, MEMORY_PER_CPU_0 + 1,
                                 MEMORY_PER_CPU_0 + 1000};
    struct arena_settings *settings = &arenas.settings;
    unsigned detail = input_byte(input);
    settings->policy = (detail & 1) != 0 ? POLICY_PAPER : POLICY_ADAPTIVE;
    settings->huge_pages = (detail & 2) != 0;
    settings->memory_per_cpu = prices[detail >> 2 & 3];
    settings->watch_cgroup = (detail & 16) != 0;
    settings->placement = (int)(detail >> 5) % 4;
    arena_refresh(&arenas);
}

static void misuse(struct input *input) {
    const struct block *slot = any_slot(input);
    size_t inside = input_size(input, 16);
    char *pointer = (char *)&arenas;
    if (slot->start != NULL && slot->bytes > 1) {
        pointer = (char *)slot->start + 1 + inside % (slot->bytes - 1);
    }
    misuses_expected++;
    arena_put_large(&arenas, pointer);
}

static void other(struct input *input) {
    unsigned detail = input_byte(input);
    switch (detail % 8) {
    case 0:
        arena_trim(&arenas, detail < 128 ? 0 : input_size(input, 24));
        break;
    case 1:
        arena_trim_by_helper(&arenas, input_size(input, 24));
        break;
    case 2:
        clock_advance(((uint64_t)1 << (detail >> 3)) * 100000);
        clock_use_cpu(input_byte(input) * 100000U, 0);
        break;
    case 3:
    case 4:
        clock_advance(120 * CLOCK_MS);
        epoch_advance(&arenas, true);
        break;
    case 5:
        kernel_leave((size_t)1 << (detail >> 3));
        break;
    case 6:
        arena_shrink_for_fork(&arenas);
        break;
    default: {
        const struct block *slot = any_slot(input);
        if (slot->start != NULL) {
            marks_note(heap_of(&arenas, slot->start), slot->start, slot->bytes, MARK_ANY);
        }
    }
    }
}

static void step(struct input *input) {
    cpu = input_byte(input) % MAX_FUZZED_ARENAS;
    switch (input_byte(input) % 16) {
    case 0:
    case 1:
    case 2:
        take_blocks(input);
        break;
    case 3:
    case 4:
        take_large(input);
        break;
    case 5:
    case 6:
    case 7:
        put_blocks(input);
        break;
    case 8:
        resize_large(input);
        break;
    case 9:
    case 10:
    case 11:
        set_something(input);
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
    /* What is over a limit that has sunk is the next thread's to purge. */
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(&arenas, &number)) != NULL;) {
        heap_lock(arena);
        report_levels(&arenas, arena);
        heap_unlock_and_check(&arenas, arena);
    }
}

static bool start(struct input *input) {
    static bool is_first = true;
    page_size = vm_page_size();
    if (is_first) {
        is_first = false;
        size_classes_fill(&classes, page_size);
        clock_stop();
    }
    memset(&caches, 0, sizeof caches);
    memset(&arenas, 0, sizeof arenas);
    unsigned detail = input_byte(input);
    is_limited = (detail & 4) != 0;
    if (is_limited) {
        kernel_limit((size_t)32 << (20 + (detail >> 4 & 7)));
    }
    clock_set_step((detail & 8) != 0 ? 1000 : 0);
    clock_set_cpu_step((detail & 8) != 0 ? 500 : 0);
    arenas.settings.watch_cgroup = 1;
    arenas.settings.huge_pages = 1;
    arenas.settings.heaps = HEAPS_0 + (int)(detail >> 1 & 1) * MAX_FUZZED_ARENAS;
    cpu_caches_init(&caches, &classes, (struct rseq_offsets){0});
    cpu_caches_start(&caches, CACHE_OFF);
    size_t mapped = kernel_mapped();
    if ((detail & 128) != 0) {
        kernel_refuse((uint32_t)input_number(input, 2));
    }
    bool with_depots = (detail & 1) != 0;
    bool started = arena_init(&arenas, &classes, &caches, HEAP_SPACE_BYTES, with_depots, misused);
    if (!started && kernel_refusals() > 0) { /* a start that failed leaves nothing, and may be tried again */
        CHECK_EQUAL(kernel_mapped(), mapped);
        kernel_refuse(0);
        started = arena_init(&arenas, &classes, &caches, HEAP_SPACE_BYTES, with_depots, misused);
    }
    arenas.settings.heaps = HEAPS_AUTO; /* from here on the CPU's number decides */
    return started;
}

/* Everything is freed and purged. */
static void end(void) {
    kernel_refuse(0);
    for (size_t i = 0; i < SLOTS; i++) {
        struct block *slot = &slots[i];
        if (slot->start == NULL) {
            continue;
        }
        blocks_check(slot, slot->bytes);
        if (slot->size_class == 0) {
            arena_put_large(&arenas, slot->start);
        } else {
            void *one = slot->start;
            arena_put_blocks(&arenas, slot->size_class, &one, 1);
        }
        slot->start = NULL;
    }
    CHECK_EQUAL(misuses, misuses_expected);
    walk();
    arena_trim(&arenas, 0);
    walk();
    if (!kernel_has_lost_pages()) {
        CHECK_EQUAL((used_pages(&arenas) + dirty_pages(&arenas)), 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static const size_t steps_per_walk[] = {1, 4, 16, MAX_STEPS};
    struct input input = {bytes, count};
    memset(slots, 0, sizeof slots);
    misuses = misuses_expected = 0;
    size_t period = steps_per_walk[input_byte(&input) & 3];
    if (start(&input)) {
        for (size_t i = 1; input.left > 0 && i < MAX_STEPS; i++) {
            step(&input);
            check_limit();
            if (i % period == 0) {
                walk();
            }
        }
        end();
    }
    kernel_reset();
    return 0;
}
