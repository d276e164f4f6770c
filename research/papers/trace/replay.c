/* calm-trace-replay: reads a recorded trace on standard input and runs it through the allocators of layout.h,
 * all four at once, each with a machine of its own. A program's accesses within a block that it had go to
 * where the simulated allocator has put that block; all others stay where they were. Prints JSON. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "layout.h"
#include "machine.h"
#include "record.h"

enum {
    WORLDS = 4,
    GRANULE = 16, /* the least distance of two blocks of glibc's */
    LEAF_BYTES = 1 << 16,
    LEAF_GRANULES = LEAF_BYTES / GRANULE,
    BRANCH_LEAVES = 1 << 14,
    BRANCHES = 1 << 17, /* in all, 2^47 bytes */
    RECORDS = 4096,
};

/* The number of the block that each granule belongs to; 0 for none. */
struct leaf {
    uint32_t block[LEAF_GRANULES];
};

struct branch {
    struct leaf *leaves[BRANCH_LEAVES];
};

struct block {
    uint64_t address; /* as recorded */
    uint64_t bytes;
    uint64_t simulated[WORLDS];
    uint32_t next_unused;
};

static const struct {
    const char *name;
    struct layout_kind kind;
} kinds[WORLDS] = {
    {"aggregated inline", {.segregated = false, .offloaded = false}},
    {"segregated inline", {.segregated = true, .offloaded = false}},
    {"aggregated offloaded", {.segregated = false, .offloaded = true}},
    {"segregated offloaded", {.segregated = true, .offloaded = true}},
};

static struct machine *machines[WORLDS];
static struct layout *layouts[WORLDS];
static struct branch *branches[BRANCHES];
static struct block *blocks;
static uint32_t block_count = 1;
static uint32_t block_room;
static uint32_t unused; /* a block that was freed; 0 for none */
static uint64_t instructions, mallocs, frees, in_blocks, elsewhere;

static void *checked(void *memory) {
    if (memory == NULL) {
        fputs("calm-trace-replay: out of memory\n", stderr);
        exit(1);
    }
    return memory;
}

/* The granule's place; NULL where there was never a block, or nothing can be. */
static uint32_t *place_of(uint64_t address, int make) {
    uint64_t leaf = address / LEAF_BYTES;
    uint64_t branch = leaf / BRANCH_LEAVES;
    if (branch >= BRANCHES || (branches[branch] == NULL && !make)) {
        return NULL;
    }
    if (branches[branch] == NULL) {
        branches[branch] = checked(calloc(1, sizeof(struct branch)));
    }
    struct leaf **there = &branches[branch]->leaves[leaf % BRANCH_LEAVES];
    if (*there == NULL) {
        if (!make) {
            return NULL;
        }
        *there = checked(calloc(1, sizeof(struct leaf)));
    }
    return &(*there)->block[address % LEAF_BYTES / GRANULE];
}

static void own(const struct block *block, uint32_t number) {
    uint64_t end = block->address + (block->bytes == 0 ? 1 : block->bytes);
    for (uint64_t at = block->address; at < end; at += GRANULE) {
        uint32_t *place = place_of(at, 1);
        if (place != NULL) {
            *place = number;
        }
    }
}

static uint32_t new_block(void) {
    if (unused != 0) {
        uint32_t number = unused;
        unused = blocks[number].next_unused;
        return number;
    }
    if (block_count >= block_room) {
        block_room = block_room == 0 ? 4096 : block_room * 2;
        blocks = checked(realloc(blocks, block_room * sizeof *blocks));
    }
    return block_count++;
}

static void replay_malloc(const struct record *record) {
    uint32_t number = new_block();
    struct block *block = &blocks[number];
    *block = (struct block){.address = record->address, .bytes = record->bytes};
    for (unsigned i = 0; i < WORLDS; i++) {
        block->simulated[i] = layout_malloc(layouts[i], record->thread, record->bytes);
    }
    own(block, number);
    mallocs++;
}

static void replay_free(const struct record *record) {
    const uint32_t *place = place_of(record->address, 0);
    /* One that was there before the recording began is not known. */
    if (place == NULL || *place == 0 || blocks[*place].address != record->address) {
        return;
    }
    uint32_t number = *place;
    for (unsigned i = 0; i < WORLDS; i++) {
        layout_free(layouts[i], record->thread, blocks[number].simulated[i]);
    }
    own(&blocks[number], 0);
    blocks[number].next_unused = unused;
    unused = number;
    frees++;
}

static void replay_access(const struct record *record) {
    const uint32_t *place = place_of(record->address, 0);
    const struct block *block = place != NULL && *place != 0 ? &blocks[*place] : NULL;
    (void)(block != NULL ? in_blocks++ : elsewhere++);
    for (unsigned i = 0; i < WORLDS; i++) {
        uint64_t address = record->address;
        if (block != NULL) {
            address = block->simulated[i] + (record->address - block->address);
        }
        machine_access(machines[i], record->thread, address, record->bytes, record->kind == RECORD_STORE);
    }
}

static bool replay(const struct record *record) {
    if (record->thread >= LAYOUT_SERVER || record->kind > RECORD_FREE ||
        (record->kind <= RECORD_STORE && record->bytes == 0)) {
        return false;
    }
    instructions += record->instructions;
    if (record->kind == RECORD_MALLOC) {
        replay_malloc(record);
    } else if (record->kind == RECORD_FREE) {
        replay_free(record);
    } else {
        replay_access(record);
    }
    return true;
}

static void add(struct machine_counts *sum, const struct machine_counts *more) {
    for (unsigned kind = 0; kind < MACHINE_KINDS; kind++) {
        sum->accesses[kind] += more->accesses[kind];
        sum->l1_misses[kind] += more->l1_misses[kind];
        sum->l2_misses[kind] += more->l2_misses[kind];
        sum->llc_misses[kind] += more->llc_misses[kind];
        sum->coherence[kind] += more->coherence[kind];
        sum->tlb_misses[kind] += more->tlb_misses[kind];
        sum->walks[kind] += more->walks[kind];
    }
    sum->upgrades += more->upgrades;
}

static uint64_t both(const uint64_t *kinds_of) {
    return kinds_of[MACHINE_LOAD] + kinds_of[MACHINE_STORE];
}

static void write_counts(struct json *json, const char *name, const struct machine_counts *counts) {
    json_begin(json, name);
    json_int(json, "accesses", both(counts->accesses));
    json_int(json, "l1_misses", both(counts->l1_misses));
    json_int(json, "l2_misses", both(counts->l2_misses));
    json_int(json, "llc_misses", both(counts->llc_misses));
    json_int(json, "coherence", both(counts->coherence));
    json_int(json, "upgrades", counts->upgrades);
    json_int(json, "tlb_misses", both(counts->tlb_misses));
    json_int(json, "walks", both(counts->walks));
    json_end(json);
}

static void write_report(void) {
    struct json json = {.file = stdout};
    json_begin(&json, NULL);
    json_int(&json, "instructions", instructions);
    json_int(&json, "mallocs", mallocs);
    json_int(&json, "frees", frees);
    json_int(&json, "accesses_in_blocks", in_blocks);
    json_int(&json, "accesses_elsewhere", elsewhere);
    json_begin(&json, "layouts");
    for (unsigned i = 0; i < WORLDS; i++) {
        struct machine_counts users = {0};
        for (unsigned cpu = 0; cpu < LAYOUT_SERVER; cpu++) {
            add(&users, machine_counts(machines[i], cpu));
        }
        json_begin(&json, kinds[i].name);
        write_counts(&json, "users", &users);
        json_int(&json, "message_misses", layout_message_misses(layouts[i]));
        write_counts(&json, "server", machine_counts(machines[i], LAYOUT_SERVER));
        json_end(&json);
    }
    json_end(&json);
    json_end(&json);
    putchar('\n');
}

static int fail(const char *why) {
    fprintf(stderr, "calm-trace-replay: %s\n", why);
    return 1;
}

int main(void) {
    for (unsigned i = 0; i < WORLDS; i++) {
        machines[i] = checked(machine_new(&machine_default));
        layouts[i] = checked(layout_new(kinds[i].kind, machines[i]));
    }
    static struct record records[RECORDS];
    size_t left = 0; /* bytes of a record that is not whole, which only the last can be */
    for (size_t bytes; (bytes = fread(records, 1, sizeof records, stdin)) > 0;) {
        for (size_t i = 0; i < bytes / sizeof *records; i++) {
            if (!replay(&records[i])) {
                return fail("standard input is no trace");
            }
        }
        left = bytes % sizeof *records;
    }
    if (ferror(stdin)) {
        return fail("standard input cannot be read");
    }
    if (left != 0) {
        return fail("the trace ends within a record");
    }
    write_report();
    return fflush(stdout) == 0 ? 0 : 1;
}
