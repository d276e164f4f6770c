/* The model of caches and the simulated allocators, compared with cases worked out by hand. */
#include <string.h>

#include "check.h"
#include "layout.h"
#include "machine.h"

enum { LINE = MACHINE_LINE_BYTES, PAGE = MACHINE_PAGE_BYTES, LOAD = MACHINE_LOAD, STORE = MACHINE_STORE };

/* Lines 0, 2, 4, … share a set of every cache; L1 has room for one of them, L2 for two, the LLC for four. */
static const struct machine_shape tiny = {
    .l1 = {.sets = 2, .ways = 1},
    .l2 = {.sets = 2, .ways = 2},
    .llc = {.sets = 2, .ways = 4},
    .tlb = {.sets = 1, .ways = 2},
    .stlb = {.sets = 1, .ways = 3},
};

static struct machine *made(const struct machine_shape *shape) {
    struct machine *machine = machine_new(shape);
    CHECK(machine != NULL);
    return machine;
}

static void load_line(struct machine *machine, unsigned cpu, uint64_t line) {
    machine_access(machine, cpu, line * LINE, 8, false);
}

static void store_line(struct machine *machine, unsigned cpu, uint64_t line) {
    machine_access(machine, cpu, line * LINE, 8, true);
}

#define CHECK_COUNTS(machine, cpu, field, loads, stores)                   \
    do {                                                                   \
        CHECK_EQUAL(machine_counts(machine, cpu)->field[LOAD], (loads));   \
        CHECK_EQUAL(machine_counts(machine, cpu)->field[STORE], (stores)); \
    } while (0)

static void test_levels(void) {
    struct machine *machine = made(&tiny);
    load_line(machine, 0, 0); /* misses everywhere */
    load_line(machine, 0, 0); /* hits L1 */
    CHECK_COUNTS(machine, 0, accesses, 2, 0);
    CHECK_COUNTS(machine, 0, l1_misses, 1, 0);
    CHECK_COUNTS(machine, 0, llc_misses, 1, 0);
    load_line(machine, 0, 1); /* of the other set: line 0 stays */
    load_line(machine, 0, 0);
    CHECK_COUNTS(machine, 0, l1_misses, 2, 0);
    load_line(machine, 0, 2); /* takes line 0's place in L1, not in L2 */
    load_line(machine, 0, 0);
    CHECK_COUNTS(machine, 0, l1_misses, 4, 0);
    CHECK_COUNTS(machine, 0, l2_misses, 3, 0);
    load_line(machine, 0, 4); /* line 2 was used before line 0, so it leaves L2 */
    load_line(machine, 0, 0);
    CHECK_COUNTS(machine, 0, l2_misses, 4, 0);
    load_line(machine, 0, 2); /* in the LLC still */
    CHECK_COUNTS(machine, 0, l2_misses, 5, 0);
    CHECK_COUNTS(machine, 0, llc_misses, 4, 0);
    store_line(machine, 0, 6); /* a fourth line of the set */
    store_line(machine, 0, 8); /* a fifth: the one that was asked of the LLC longest ago leaves, which is 0 */
    CHECK_COUNTS(machine, 0, llc_misses, 4, 2);
    load_line(machine, 0, 0);
    CHECK_COUNTS(machine, 0, llc_misses, 5, 2);
    CHECK_COUNTS(machine, 0, l2_misses, 6, 2);
    CHECK_EQUAL(machine_counts(machine, 0)->upgrades, 0);
    machine_delete(machine);
}

static void test_l2_has_all_of_l1(void) {
    struct machine *machine = made(&tiny);
    load_line(machine, 0, 0);
    load_line(machine, 0, 2);
    load_line(machine, 0, 4); /* line 0 leaves L2 */
    load_line(machine, 0, 2); /* from L2 */
    load_line(machine, 0, 2);
    CHECK_COUNTS(machine, 0, l1_misses, 4, 0);
    CHECK_COUNTS(machine, 0, l2_misses, 3, 0);
    /* An L1 of two ways keeps lines 0 and 2, but L2, which sees only misses, lets go of line 0. */
    struct machine_shape wide = tiny;
    wide.l1.ways = 3;
    struct machine *other = made(&wide);
    load_line(other, 0, 0);
    load_line(other, 0, 2);
    load_line(other, 0, 0);
    load_line(other, 0, 4);
    load_line(other, 0, 0);
    CHECK_COUNTS(other, 0, l1_misses, 4, 0);
    CHECK_COUNTS(other, 0, l2_misses, 4, 0);
    machine_delete(other);
    machine_delete(machine);
}

static void test_a_store_takes_the_line(void) {
    struct machine *machine = made(&tiny);
    load_line(machine, 0, 0);
    load_line(machine, 1, 0); /* shared now; the LLC has it */
    CHECK_COUNTS(machine, 1, l2_misses, 1, 0);
    CHECK_COUNTS(machine, 1, llc_misses, 0, 0);
    store_line(machine, 1, 0); /* has it, and takes it from CPU 0 */
    CHECK_EQUAL(machine_counts(machine, 1)->upgrades, 1);
    CHECK_COUNTS(machine, 1, l1_misses, 1, 0);
    store_line(machine, 1, 0); /* its own */
    CHECK_EQUAL(machine_counts(machine, 1)->upgrades, 1);
    load_line(machine, 0, 0); /* lost, and CPU 1 has changed it */
    CHECK_COUNTS(machine, 0, coherence, 1, 0);
    CHECK_COUNTS(machine, 0, transfers, 1, 0);
    CHECK_COUNTS(machine, 0, l2_misses, 2, 0);
    CHECK_COUNTS(machine, 0, llc_misses, 1, 0);
    load_line(machine, 1, 0); /* it keeps what it wrote */
    CHECK_COUNTS(machine, 1, l1_misses, 1, 0);
    store_line(machine, 1, 0); /* but must ask again */
    CHECK_EQUAL(machine_counts(machine, 1)->upgrades, 2);
    store_line(machine, 0, 0); /* lost again: a miss, no upgrade */
    CHECK_COUNTS(machine, 0, coherence, 1, 1);
    CHECK_COUNTS(machine, 0, transfers, 1, 1);
    CHECK_COUNTS(machine, 0, l1_misses, 2, 1);
    CHECK_EQUAL(machine_counts(machine, 0)->upgrades, 0);
    machine_delete(machine);
}

static void test_other_bytes_of_a_line_are_lost_too(void) {
    struct machine *machine = made(&tiny);
    for (unsigned round = 0; round < 10; round++) {
        machine_access(machine, 0, 0, 8, true);
        machine_access(machine, 1, 8, 8, true);
        machine_access(machine, 2, LINE, 8, true);
    }
    CHECK_COUNTS(machine, 0, coherence, 0, 9);
    CHECK_COUNTS(machine, 1, coherence, 0, 9);
    CHECK_COUNTS(machine, 1, transfers, 0, 10);
    CHECK_COUNTS(machine, 2, l1_misses, 0, 1);
    machine_delete(machine);
}

static void test_what_had_no_room_is_not_lost(void) {
    struct machine *machine = made(&tiny);
    store_line(machine, 0, 0);
    load_line(machine, 0, 2);
    load_line(machine, 0, 4); /* line 0 leaves, and is written back */
    store_line(machine, 1, 0);
    CHECK_COUNTS(machine, 1, llc_misses, 0, 0);
    CHECK_COUNTS(machine, 1, transfers, 0, 0);
    load_line(machine, 0, 0); /* it would have missed anyway */
    CHECK_COUNTS(machine, 0, coherence, 0, 0);
    CHECK_COUNTS(machine, 0, transfers, 1, 0);
    machine_delete(machine);
}

static void test_a_line_that_another_cpu_has_is_no_miss_of_the_llc(void) {
    struct machine *machine = made(&tiny);
    load_line(machine, 0, 0);
    for (uint64_t line = 2; line <= 8; line += 2) {
        load_line(machine, 1, line); /* four lines: the LLC drops line 0, CPU 0 keeps it */
    }
    load_line(machine, 0, 0);
    CHECK_COUNTS(machine, 0, l1_misses, 1, 0);
    load_line(machine, 2, 0);
    CHECK_COUNTS(machine, 2, l2_misses, 1, 0);
    CHECK_COUNTS(machine, 2, llc_misses, 0, 0);
    CHECK_COUNTS(machine, 2, transfers, 0, 0);
    machine_delete(machine);
}

static void test_stores_take_lines_that_others_only_read(void) {
    struct machine *machine = made(&tiny);
    load_line(machine, 0, 0);
    load_line(machine, MACHINE_CPUS - 1, 0);
    store_line(machine, 70, 0); /* a miss: it is no upgrade, and nothing was changed */
    CHECK_EQUAL(machine_counts(machine, 70)->invalidations, 1);
    CHECK_EQUAL(machine_counts(machine, 70)->upgrades, 0);
    CHECK_COUNTS(machine, 70, transfers, 0, 0);
    load_line(machine, MACHINE_CPUS - 1, 0);
    CHECK_COUNTS(machine, MACHINE_CPUS - 1, coherence, 1, 0);
    CHECK_COUNTS(machine, MACHINE_CPUS - 1, transfers, 1, 0);
    store_line(machine, MACHINE_CPUS - 1, 0);
    CHECK_EQUAL(machine_counts(machine, MACHINE_CPUS - 1)->invalidations, 1);
    CHECK_EQUAL(machine_counts(machine, MACHINE_CPUS - 1)->upgrades, 1);
    store_line(machine, MACHINE_CPUS - 1, 0);
    CHECK_EQUAL(machine_counts(machine, MACHINE_CPUS - 1)->invalidations, 1);
    /* Without nodes, nothing is remote. */
    CHECK_COUNTS(machine, MACHINE_CPUS - 1, remote_lines, 0, 0);
    CHECK_COUNTS(machine, 70, remote_pages, 0, 0);
    machine_delete(machine);
}

/* CPUs 0 and 2 are of one node, 1 and 3 of the other. */
static void test_nodes(void) {
    struct machine_shape shape = machine_default;
    shape.nodes = 2;
    struct machine *machine = made(&shape);
    store_line(machine, 0, 0); /* its page belongs to CPU 0's node from now on */
    CHECK_COUNTS(machine, 0, remote_lines, 0, 0);
    CHECK_COUNTS(machine, 0, remote_pages, 0, 0);
    load_line(machine, 1, 0);
    CHECK_COUNTS(machine, 1, remote_lines, 1, 0);
    load_line(machine, 3, 0); /* CPU 1 had it last, of its own node; and so no memory is asked */
    CHECK_COUNTS(machine, 3, remote_lines, 0, 0);
    CHECK_COUNTS(machine, 3, remote_pages, 0, 0);
    store_line(machine, 3, 0); /* takes it from CPU 0, too */
    CHECK_COUNTS(machine, 3, remote_lines, 0, 1);
    load_line(machine, 1, 1); /* another line of that page, which no CPU has */
    CHECK_COUNTS(machine, 1, remote_pages, 1, 0);
    CHECK_COUNTS(machine, 1, remote_lines, 1, 0);
    load_line(machine, 2, 2);
    CHECK_COUNTS(machine, 2, remote_pages, 0, 0);
    store_line(machine, 1, 1); /* a hit */
    CHECK_COUNTS(machine, 1, remote_lines, 1, 0);
    /* A CPU that moves takes what it did with it. */
    machine_set_node(machine, 1, 0);
    load_line(machine, 0, 1);
    CHECK_COUNTS(machine, 0, remote_lines, 0, 0);
    load_line(machine, 1, 3);
    CHECK_COUNTS(machine, 1, remote_pages, 1, 0);
    load_line(machine, 3, 4);
    CHECK_COUNTS(machine, 3, remote_pages, 1, 0);
    machine_delete(machine);
}

static void test_tlb(void) {
    struct machine *machine = made(&tiny);
    for (uint64_t page = 0; page < 3; page++) {
        machine_access(machine, 0, page * PAGE, 1, false);
    }
    CHECK_COUNTS(machine, 0, walks, 3, 0);
    machine_access(machine, 0, 2 * PAGE + 8, 1, true); /* still there */
    machine_access(machine, 0, 0, 1, true);            /* in the second level only */
    CHECK_COUNTS(machine, 0, tlb_misses, 3, 1);
    CHECK_COUNTS(machine, 0, walks, 3, 0);
    machine_access(machine, 0, 3 * PAGE, 1,
                   false); /* the second level drops page 1, not 0, which was asked of it */
    machine_access(machine, 0, 2 * PAGE, 1, false);
    CHECK_COUNTS(machine, 0, walks, 4, 0);
    machine_access(machine, 0, 1 * PAGE, 1, false);
    CHECK_COUNTS(machine, 0, walks, 5, 0);
    machine_delete(machine);
}

static void test_accesses_across_borders(void) {
    struct machine *machine = made(&tiny);
    machine_access(machine, 0, LINE - 4, 8, false);
    CHECK_COUNTS(machine, 0, accesses, 1, 0);
    CHECK_COUNTS(machine, 0, l1_misses, 2, 0);
    CHECK_COUNTS(machine, 0, tlb_misses, 1, 0);
    machine_access(machine, 1, PAGE - 1, 2, true);
    CHECK_COUNTS(machine, 1, l1_misses, 0, 2);
    CHECK_COUNTS(machine, 1, tlb_misses, 0, 2);
    machine_access(machine, 2, 3 * LINE, 4 * LINE, false);
    CHECK_COUNTS(machine, 2, l1_misses, 4, 0);
    machine_delete(machine);
}

static void test_counts_are_cleared_and_caches_kept(void) {
    struct machine *machine = made(&tiny);
    load_line(machine, 0, 0);
    load_line(machine, 1, 1);
    machine_clear_counts(machine);
    load_line(machine, 0, 0);
    CHECK_COUNTS(machine, 0, accesses, 1, 0);
    CHECK_COUNTS(machine, 0, l1_misses, 0, 0);
    load_line(machine, 1, 1);
    machine_clear_cpu(machine, 0);
    CHECK_COUNTS(machine, 0, accesses, 0, 0);
    CHECK_COUNTS(machine, 1, accesses, 1, 0);
    CHECK_COUNTS(machine, 2, accesses, 0, 0); /* was never there */
    machine_delete(machine);
}

/* More lines than the directory begins with: who has which is not forgotten as it grows. */
static void test_many_lines(void) {
    struct machine *machine = made(&machine_default);
    enum { LINES = 300000 };
    store_line(machine, 1, 0);
    for (uint64_t line = 1; line < LINES; line++) {
        load_line(machine, 0, line);
    }
    CHECK_COUNTS(machine, 0, llc_misses, LINES - 1, 0);
    load_line(machine, 0, 0);
    CHECK_COUNTS(machine, 0, transfers, 1, 0);
    CHECK_COUNTS(machine, 0, llc_misses, LINES - 1, 0);
    store_line(machine, 2, LINES - 1);
    load_line(machine, 0, LINES - 1);
    CHECK_COUNTS(machine, 0, coherence, 1, 0);
    store_line(machine, 2, 1); /* long gone from CPU 0's caches */
    load_line(machine, 0, 1);
    CHECK_COUNTS(machine, 0, coherence, 1, 0);
    machine_delete(machine);
}

/* The simulated allocators. */

static const struct layout_kind kinds[] = {{false, false}, {true, false}, {false, true}, {true, true}};

struct world {
    struct machine *machine;
    struct layout *layout;
};

static struct world world_of(struct layout_kind kind) {
    struct world world = {.machine = made(&machine_default)};
    world.layout = layout_new(kind, world.machine);
    CHECK(world.layout != NULL);
    return world;
}

static void end(struct world world) {
    layout_delete(world.layout);
    machine_delete(world.machine);
}

static void test_blocks_are_apart(void) {
    for (unsigned i = 0; i < 4; i++) {
        struct world world = world_of(kinds[i]);
        uint64_t last_end = 0;
        for (uint64_t bytes = 0; bytes <= 300000; bytes += bytes < 2000 ? 1 : 997) {
            uint64_t one = layout_malloc(world.layout, 0, bytes);
            uint64_t other = layout_malloc(world.layout, 0, bytes);
            uint64_t low = one < other ? one : other;
            uint64_t high = one < other ? other : one;
            CHECK(low + bytes <= high && low != high);
            CHECK(bytes < 16 || low % 16 == 0);
            last_end = high;
        }
        CHECK(last_end != 0);
        end(world);
    }
}

static void test_no_block_is_given_twice(void) {
    enum { BLOCKS = 5000, BYTES = 48 };
    struct world world = world_of(kinds[1]);
    static uint64_t blocks[BLOCKS];
    uint64_t least = UINT64_MAX;
    for (unsigned i = 0; i < BLOCKS; i++) {
        blocks[i] = layout_malloc(world.layout, 0, BYTES);
        least = blocks[i] < least ? blocks[i] : least;
    }
    /* Pages lie one behind the other, and 64 KiB hold 1,365 of these. */
    static bool seen[4 * 65536 / BYTES + 1];
    for (unsigned i = 0; i < BLOCKS; i++) {
        uint64_t page = (blocks[i] - least) / 65536;
        uint64_t index = page * 1365 + (blocks[i] - least) % 65536 / BYTES;
        CHECK(index < sizeof seen && !seen[index]);
        CHECK_EQUAL((blocks[i] - least) % 65536 % BYTES, 0);
        seen[index] = true;
    }
    /* All of them come back, and no page more is needed. */
    for (unsigned i = 0; i < BLOCKS; i++) {
        layout_free(world.layout, 0, blocks[i]);
    }
    for (unsigned i = 0; i < BLOCKS; i++) {
        CHECK(layout_malloc(world.layout, 0, BYTES) < least + (uint64_t)4 * 65536);
    }
    end(world);
}

static void test_all_layouts_give_the_same_blocks(void) {
    enum { STEPS = 20000, SLOTS = 500 };
    struct world worlds[4];
    static uint64_t blocks[4][SLOTS];
    for (unsigned i = 0; i < 4; i++) {
        worlds[i] = world_of(kinds[i]);
    }
    uint64_t random = 1;
    for (unsigned step = 0; step < STEPS; step++) {
        random = random * 6364136223846793005U + 1442695040888963407U;
        unsigned slot = (unsigned)(random >> 33) % SLOTS;
        uint64_t bytes = (random >> 50) % 700 * ((random >> 45) % 64 == 0 ? 200 : 1);
        for (unsigned i = 0; i < 4; i++) {
            if (blocks[i][slot] != 0) {
                layout_free(worlds[i].layout, 0, blocks[i][slot]);
                blocks[i][slot] = 0;
            } else {
                blocks[i][slot] = layout_malloc(worlds[i].layout, 0, bytes);
                CHECK_EQUAL(blocks[i][slot], blocks[0][slot]);
            }
        }
    }
    for (unsigned i = 0; i < 4; i++) {
        end(worlds[i]);
    }
}

/* The program writes a block, frees it, and gets it back: who has touched it in between? */
static void test_who_touches_a_free_block(void) {
    for (unsigned i = 0; i < 4; i++) {
        struct world world = world_of(kinds[i]);
        uint64_t block = layout_malloc(world.layout, 0, LINE);
        machine_access(world.machine, 0, block, 8, true);
        layout_free(world.layout, 0, block);
        CHECK_EQUAL(layout_malloc(world.layout, 0, LINE), block);
        struct machine_counts before = *machine_counts(world.machine, 0);
        machine_access(world.machine, 0, block, 8, true);
        const struct machine_counts *after = machine_counts(world.machine, 0);
        bool lost = kinds[i].offloaded && !kinds[i].segregated;
        CHECK_EQUAL(after->coherence[STORE] - before.coherence[STORE], lost);
        CHECK_EQUAL(after->l1_misses[STORE] - before.l1_misses[STORE], lost);
        CHECK_EQUAL(after->upgrades - before.upgrades, 0);
        end(world);
    }
}

/* Inline, the list in the blocks is a first touch of each; offloaded, nothing but messages misses. */
static void test_what_is_touched_where(void) {
    struct machine_counts users[4];
    struct machine_counts server[4];
    enum { CALLS = 64 }; /* of 64 bytes: one extension of 4 KiB */
    for (unsigned i = 0; i < 4; i++) {
        struct world world = world_of(kinds[i]);
        for (unsigned call = 0; call < CALLS; call++) {
            (void)layout_malloc(world.layout, 0, LINE);
        }
        users[i] = *machine_counts(world.machine, 0);
        server[i] = *machine_counts(world.machine, LAYOUT_SERVER);
        end(world);
    }
    /* Inline: a head, a descriptor and the map's entry, a line each; and 64 blocks, or 128 bytes of indices.
     */
    CHECK_EQUAL(users[0].l2_misses[LOAD] + users[0].l2_misses[STORE], 3 + 64);
    CHECK_EQUAL(users[1].l2_misses[LOAD] + users[1].l2_misses[STORE], 3 + 2);
    CHECK_EQUAL(server[0].accesses[LOAD] + server[1].accesses[STORE], 0);
    /* Offloaded: a word to ask with and one that answers, each on another CPU's line by then. */
    for (unsigned i = 2; i < 4; i++) {
        CHECK_EQUAL(users[i].accesses[LOAD], CALLS);
        CHECK_EQUAL(users[i].accesses[STORE], CALLS);
        CHECK_EQUAL(users[i].l2_misses[LOAD], CALLS);
        /* The first is a first touch; later the answer was read, so the line is here, and shared. */
        CHECK_EQUAL(users[i].l2_misses[STORE], 1);
        CHECK_EQUAL(users[i].upgrades, CALLS - 1);
    }
}

static void test_messages_are_counted_apart(void) {
    struct world world = world_of(kinds[3]);
    uint64_t blocks[LAYOUT_RING_WORDS];
    for (unsigned i = 0; i < LAYOUT_RING_WORDS; i++) {
        blocks[i] = layout_malloc(world.layout, 0, 32);
    }
    CHECK_EQUAL(layout_message_misses(world.layout), 2 * LAYOUT_RING_WORDS);
    /* Eight words of the ring to a line, and nobody has read them: each line is taken once. */
    for (unsigned i = 0; i + 1 < LAYOUT_RING_WORDS; i++) {
        layout_free(world.layout, 0, blocks[i]);
    }
    CHECK_EQUAL(layout_message_misses(world.layout), 2 * LAYOUT_RING_WORDS + LAYOUT_RING_WORDS / 8);
    uint64_t before = machine_counts(world.machine, LAYOUT_SERVER)->accesses[LOAD];
    /* The last word fills it, so that it is emptied. */
    layout_free(world.layout, 0, blocks[LAYOUT_RING_WORDS - 1]);
    CHECK(machine_counts(world.machine, LAYOUT_SERVER)->accesses[LOAD] >= before + LAYOUT_RING_WORDS);
    CHECK_EQUAL(layout_malloc(world.layout, 0, 32), blocks[LAYOUT_RING_WORDS - 1]);
    end(world);
}

int main(void) {
    test_levels();
    test_l2_has_all_of_l1();
    test_a_store_takes_the_line();
    test_other_bytes_of_a_line_are_lost_too();
    test_what_had_no_room_is_not_lost();
    test_a_line_that_another_cpu_has_is_no_miss_of_the_llc();
    test_stores_take_lines_that_others_only_read();
    test_nodes();
    test_tlb();
    test_accesses_across_borders();
    test_counts_are_cleared_and_caches_kept();
    test_many_lines();
    test_blocks_are_apart();
    test_no_block_is_given_twice();
    test_all_layouts_give_the_same_blocks();
    test_who_touches_a_free_block();
    test_what_is_touched_where();
    test_messages_are_counted_apart();
    return 0;
}
