/*
 * A stream of operations on a governor: magazines and large blocks, trims, epochs, settings, and changes
 * between the modes in which threads share the heap or a server has it to itself. Against a model of the
 * blocks in use; the limit on free memory holds after each operation, unless the kernel has refused a call.
 */
#include "governor/governor.h"
#include "blocks.h"
#include "check.h"
#include "governor/blocks.h"
#include "governor/check.h"
#include "governor/epoch.h"
#include "governor/large.h"
#include "governor/limit.h"
#include "governor/terms.h"
#include "heap/marks.h"
#include "input.h"
#include "kernel.h"
#include "test_clock.h"
#include "walk.h"

#define SLOTS     128
#define MAX_BYTES ((size_t)8 << 20) /* of all blocks */
#define MAX_STOCK 64
#define MAX_STEPS 4096

static struct size_classes classes;
static struct cpu_caches caches;
static struct governor governor;
static struct block slots[SLOTS];
static size_t page_size;
static size_t misuses, misuses_expected;
static bool is_limited; /* address space: then it may run out */

/* As the server's queues: blocks of one class that are kept ready. */
static struct {
    void *blocks[MAX_STOCK];
    size_t count;
    uint32_t class;
} stock;

uint64_t __wrap_random_process_seed(void);

uint64_t __wrap_random_process_seed(void) {
    return 1;
}

static void misused(const struct misuse_record *misuse) {
    (void)misuse;
    misuses++;
}

/* In a heap with clients these are not reported. */
static void take_misuse(void) {
    struct misuse_record notes[MISUSE_RECORDS];
    misuses += governor_take_misuse(&governor, notes);
    CHECK_EQUAL(misuses, misuses_expected);
}

static void between_slices(void *context) {
    (void)context;
}

static size_t cached(const void *context, size_t *bytes) {
    (void)context;
    *bytes = stock.count == 0 ? 0 : stock.count * classes.of[stock.class].size;
    return stock.count;
}

static void flush_stock(void *context) {
    (void)context;
    size_t count = stock.count;
    stock.count = 0;
    if (count > 0) {
        governor_put_blocks(&governor, stock.class, stock.blocks, count);
    }
}

static const struct heap_ops ops = {NULL, between_slices, cached, flush_stock};

static void walk(void) {
    if (!kernel_has_lost_pages()) {
        heap_walk(&governor.heap, NULL, 0);
    }
}

static void check_limit(void) {
    take_misuse();
    if (kernel_refusals() == 0) {
        CHECK(!is_over(&governor, limit_now(&governor).max));
        CHECK(heap_used_pages(&governor.heap) * page_size >= blocks_sum(slots, SLOTS));
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

static size_t magazine(uint32_t class, size_t wanted) {
    size_t batch = classes.of[class].batch;
    return 1 + wanted % (batch < MAX_MAGAZINE_BLOCKS ? batch : MAX_MAGAZINE_BLOCKS);
}

static void take_blocks(struct input *input) {
    uint32_t class = 1 + (uint32_t)input_below(input, classes.count - 1);
    size_t wanted = magazine(class, input_byte(input));
    bool prefaults = governor.exclusive && (input_byte(input) & 1) != 0;
    void *blocks[MAX_MAGAZINE_BLOCKS];
    if (!has_room(wanted * classes.of[class].size)) {
        return;
    }
    size_t got = governor_take_blocks(&governor, class, blocks, wanted, prefaults);
    CHECK(got > 0 || may_fail());
    CHECK(got == wanted || !governor.exclusive || may_fail());
    size_t kept = 0;
    for (size_t i = 0; i < SLOTS && kept < got; i++) {
        if (slots[i].start == NULL) {
            blocks_add(slots, SLOTS, &slots[i], blocks[kept++], classes.of[class].size, SIZE_QUANTUM);
            slots[i].class = class;
        }
    }
    if (kept < got) {
        governor_put_blocks(&governor, class, blocks + kept, got - kept);
    }
}

/* Some blocks of the class of one. */
static void put_blocks(struct input *input) {
    const struct block *first = any_slot(input);
    size_t most = 1 + input_below(input, SLOTS);
    uint32_t class = first->class;
    void *blocks[MAX_MAGAZINE_BLOCKS];
    size_t count = 0;
    if (first->start == NULL) {
        return;
    }
    for (size_t i = 0; i < SLOTS && count < most; i++) {
        struct block *slot = &slots[i];
        if (slot->start == NULL || slot->class != class) {
            continue;
        }
        blocks_check(slot, slot->bytes);
        blocks[count++] = slot->start;
        slot->start = NULL;
        if (class == 0) {
            governor_put_large(&governor, blocks[0]);
            return;
        }
        if (count == MAX_MAGAZINE_BLOCKS) {
            break;
        }
    }
    governor_put_blocks(&governor, class, blocks, count);
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
    bool prefaults = governor.exclusive && (detail & 2) != 0;
    void *block = governor_take_large(&governor, pages, align_pages, (detail & 1) != 0, prefaults, &zero);
    CHECK(block != NULL || may_fail());
    if (block != NULL) {
        if (zero) {
            blocks_check_zero(block, pages * page_size);
        }
        blocks_add(slots, SLOTS, slot, block, pages * page_size, align_pages * page_size);
        slot->class = 0;
    }
}

static void resize_large(struct input *input) {
    struct block *slot = any_slot(input);
    size_t pages = input_size(input, 10);
    if (slot->start == NULL || slot->class != 0 || pages == 0 || !has_room(pages * page_size)) {
        return;
    }
    struct span *span = heap_large_span(&governor.heap, slot->start);
    CHECK(span != NULL);
    void *resized = governor_resize_large(&governor, span, pages);
    if (resized == NULL) {
        blocks_check(slot, slot->bytes);
        return;
    }
    struct block moved = *slot;
    moved.start = resized;
    span = heap_large_span(&governor.heap, resized);
    CHECK(span != NULL && span->pages >= pages);
    size_t bytes = span->pages * page_size;
    blocks_check(&moved, bytes < slot->bytes ? bytes : slot->bytes);
    blocks_add(slots, SLOTS, slot, resized, bytes, page_size);
}

/* The server prepares blocks ahead. */
static void prepare(struct input *input) {
    uint32_t class = 1 + (uint32_t)input_below(input, classes.count - 1);
    if (governor.exclusive && stock.count == 0) {
        size_t wanted = magazine(class, input_byte(input));
        stock.class = class;
        stock.count = governor_take_blocks(&governor, class, stock.blocks,
                                           wanted < MAX_STOCK ? wanted : MAX_STOCK, true);
    } else {
        flush_stock(NULL);
    }
}

static void change_mode(struct input *input) {
    enum governor_mode mode = (enum governor_mode)input_below(input, 4);
    flush_stock(NULL);
    governor_set_mode(&governor, mode);
}

static void set_something(struct input *input) {
    static const int prices[] = {MEMORY_PER_CPU_AUTO, MEMORY_PER_CPU_0, MEMORY_PER_CPU_0 + 1,
                                 MEMORY_PER_CPU_0 + 1000};
    struct governor_settings *settings = &governor.settings;
    unsigned detail = input_byte(input);
    settings->policy = (detail & 1) != 0 ? POLICY_PAPER : POLICY_ADAPTIVE;
    settings->huge_pages = (detail & 2) != 0;
    settings->memory_per_cpu = prices[detail >> 2 & 3];
    settings->watch_cgroup = (detail & 16) != 0;
    settings->placement = (int)(detail >> 5) % 4;
    governor_refresh(&governor);
}

static void misuse(struct input *input) {
    const struct block *slot = any_slot(input);
    size_t inside = input_size(input, 16);
    char *pointer = (char *)&governor;
    if (slot->start != NULL && slot->bytes > 1) {
        pointer = (char *)slot->start + 1 + inside % (slot->bytes - 1);
    }
    misuses_expected++;
    governor_put_large(&governor, pointer);
}

static void other(struct input *input) {
    unsigned detail = input_byte(input);
    switch (detail % 8) {
    case 0:
        governor_trim(&governor, detail < 128 ? 0 : input_size(input, 24));
        break;
    case 1:
        governor_trim_by_helper(&governor, input_size(input, 24));
        break;
    case 2:
        clock_advance(((uint64_t)1 << (detail >> 3)) * 100000);
        clock_use_cpu(input_byte(input) * 100000U, 0);
        break;
    case 3:
    case 4:
        clock_advance(120 * CLOCK_MS);
        governor_tick(&governor, true);
        break;
    case 5:
        kernel_leave((size_t)1 << (detail >> 3));
        break;
    case 6:
        governor_shrink_for_fork(&governor);
        break;
    default: {
        const struct block *slot = any_slot(input);
        if (slot->start != NULL) {
            marks_note(&governor.heap, slot->start, slot->bytes, MARK_ANY);
        }
    }
    }
}

static void step(struct input *input) {
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
        prepare(input);
        break;
    case 10:
        change_mode(input);
        break;
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
    heap_lock(&governor);
    heap_unlock_and_check(&governor);
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
    memset(&governor, 0, sizeof governor);
    unsigned detail = input_byte(input);
    is_limited = (detail & 4) != 0;
    if (is_limited) {
        kernel_limit((size_t)32 << (20 + (detail >> 4 & 7)));
    }
    clock_set_step((detail & 8) != 0 ? 1000 : 0);
    clock_set_cpu_step((detail & 8) != 0 ? 500 : 0);
    governor.settings.watch_cgroup = 1;
    governor.settings.huge_pages = 1;
    governor.ops = &ops;
    cpu_caches_init(&caches, &classes, (struct rseq_offsets){0});
    cpu_caches_start(&caches, CACHE_OFF, false);
    return governor_init(&governor, &classes, &caches, HEAP_SPACE_BYTES, (detail & 1) != 0, misused);
}

/* Everything is freed and purged. */
static void end(void) {
    kernel_refuse(0);
    flush_stock(NULL);
    governor_set_mode(&governor, SHARED_FOR_GOOD);
    for (size_t i = 0; i < SLOTS; i++) {
        struct block *slot = &slots[i];
        if (slot->start == NULL) {
            continue;
        }
        blocks_check(slot, slot->bytes);
        if (slot->class == 0) {
            governor_put_large(&governor, slot->start);
        } else {
            void *one = slot->start;
            governor_put_blocks(&governor, slot->class, &one, 1);
        }
        slot->start = NULL;
    }
    take_misuse();
    walk();
    governor_trim(&governor, 0);
    walk();
    if (!kernel_has_lost_pages()) {
        CHECK_EQUAL(footprint_pages(&governor), 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static const size_t steps_per_walk[] = {1, 4, 16, MAX_STEPS};
    struct input input = {bytes, count};
    memset(slots, 0, sizeof slots);
    misuses = misuses_expected = 0;
    stock.count = 0;
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
