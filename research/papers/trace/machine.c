#include "machine.h"

#include "bits.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct machine_shape machine_default = {
    .l1 = {.sets = 64, .ways = 8},
    .l2 = {.sets = 512, .ways = 8},
    .llc = {.sets = 2048, .ways = 16},
    .tlb = {.sets = 1, .ways = 32},
    .stlb = {.sets = 256, .ways = 4},
};

enum { DIRECTORY_FIRST = 1 << 16 };

/* An entry of a cache: the number of a line or page plus one, and a mark; 0 is empty. */
typedef uint64_t entry_t;
static const entry_t writable =
    1; /* of a line in L1: no other CPU has it, and the directory says it is changed */

static entry_t entry_of(uint64_t number) {
    return (number + 1) << 1;
}

/* Each set's entries lie together, the one used last first. */
struct cache {
    struct cache_shape shape;
    entry_t *entries;
};

_Static_assert(MACHINE_CPUS <= BITS, "each CPU has a bit");

/* Who has a line. One for every line ever used; line_plus_one is 0 where there is none. */
struct holding {
    uint64_t line_plus_one;
    bits holders;          /* those that have it in their own caches */
    bits robbed;           /* those that had it until another CPU's store */
    bool changed;          /* its only holder has written to it */
    uint8_t last_plus_one; /* the CPU that fetched it last, or took it from others */
};

/* Of a page, in a directory of pages: the CPU that touched it first is its last_plus_one. */

struct directory {
    struct holding *slots; /* capacity, a power of two, is at least twice used */
    uint64_t capacity;
    uint64_t used;
};

struct cpu {
    struct cache l1;
    struct cache l2;
    struct cache tlb;
    struct cache stlb;
    struct machine_counts counts;
};

struct machine {
    struct machine_shape shape;
    struct cache llc;
    struct directory directory;
    struct directory pages; /* empty without nodes */
    uint8_t node_of[MACHINE_CPUS];
    bits of_node[MACHINE_CPUS];     /* a node's CPUs */
    struct cpu *cpus[MACHINE_CPUS]; /* made at their first access */
};

static bool cache_new(struct cache *cache, struct cache_shape shape) {
    cache->shape = shape;
    cache->entries = calloc((size_t)shape.sets * shape.ways, sizeof *cache->entries);
    return cache->entries != NULL;
}

static entry_t *set_of(const struct cache *cache, uint64_t number) {
    return &cache->entries[(number & (cache->shape.sets - 1)) * cache->shape.ways];
}

/* Puts an entry that lies at an index of its set before the others. */
static void to_front(entry_t *set, uint32_t index, entry_t entry) {
    memmove(&set[1], &set[0], index * sizeof *set);
    set[0] = entry;
}

/* Where a number is; NULL if it is not. Nothing is changed by the look. */
static entry_t *cache_peek(const struct cache *cache, uint64_t number) {
    entry_t *set = set_of(cache, number);
    entry_t wanted = entry_of(number);
    for (uint32_t i = 0; i < cache->shape.ways; i++) {
        if ((set[i] & ~writable) == wanted) {
            return &set[i];
        }
    }
    return NULL;
}

/* The same for one that is used now. */
static entry_t *cache_use(const struct cache *cache, uint64_t number) {
    entry_t *set = set_of(cache, number);
    entry_t *found = cache_peek(cache, number);
    if (found == NULL) {
        return NULL;
    }
    if (found != set) {
        to_front(set, (uint32_t)(found - set), *found);
    }
    return set;
}

/* Puts in a number that is not there; returns what had to leave for it, or 0. */
static entry_t cache_insert(const struct cache *cache, uint64_t number) {
    entry_t *set = set_of(cache, number);
    uint32_t last = cache->shape.ways - 1;
    entry_t leaves = set[last];
    to_front(set, last, entry_of(number));
    return leaves;
}

static void cache_drop(const struct cache *cache, uint64_t number) {
    entry_t *found = cache_peek(cache, number);
    if (found == NULL) {
        return;
    }
    entry_t *end = set_of(cache, number) + cache->shape.ways;
    memmove(found, found + 1, (size_t)(end - found - 1) * sizeof *found);
    end[-1] = 0;
}

static void out_of_memory(void) {
    fputs("calm-trace: out of memory\n", stderr);
    exit(1);
}

static struct holding *slot_of(const struct directory *directory, uint64_t line) {
    uint64_t hash = line * 0x9e3779b97f4a7c15U;
    for (uint64_t i = hash ^ (hash >> 32);; i++) {
        struct holding *slot = &directory->slots[i & (directory->capacity - 1)];
        if (slot->line_plus_one == 0 || slot->line_plus_one == line + 1) {
            return slot;
        }
    }
}

static void grow(struct directory *directory) {
    struct directory larger = {.capacity = directory->capacity * 2, .used = directory->used};
    larger.slots = calloc(larger.capacity, sizeof *larger.slots);
    if (larger.slots == NULL) {
        out_of_memory();
    }
    for (uint64_t i = 0; i < directory->capacity; i++) {
        const struct holding *old = &directory->slots[i];
        if (old->line_plus_one != 0) {
            *slot_of(&larger, old->line_plus_one - 1) = *old;
        }
    }
    free(directory->slots);
    *directory = larger;
}

/* Valid until the next one is asked for. */
static struct holding *holding_of(struct directory *directory, uint64_t line) {
    struct holding *slot = slot_of(directory, line);
    if (slot->line_plus_one != 0) {
        return slot;
    }
    if (++directory->used * 2 > directory->capacity) {
        grow(directory);
        slot = slot_of(directory, line);
    }
    slot->line_plus_one = line + 1;
    return slot;
}

static void cpu_delete(struct cpu *cpu) {
    if (cpu != NULL) {
        free(cpu->l1.entries);
        free(cpu->l2.entries);
        free(cpu->tlb.entries);
        free(cpu->stlb.entries);
        free(cpu);
    }
}

static struct cpu *cpu_new(const struct machine_shape *shape) {
    struct cpu *cpu = calloc(1, sizeof *cpu);
    if (cpu == NULL || !cache_new(&cpu->l1, shape->l1) || !cache_new(&cpu->l2, shape->l2) ||
        !cache_new(&cpu->tlb, shape->tlb) || !cache_new(&cpu->stlb, shape->stlb)) {
        out_of_memory();
    }
    return cpu;
}

static bool directory_new(struct directory *directory) {
    directory->capacity = DIRECTORY_FIRST;
    directory->slots = calloc(DIRECTORY_FIRST, sizeof *directory->slots);
    return directory->slots != NULL;
}

void machine_set_node(struct machine *machine, unsigned cpu, unsigned node) {
    machine->of_node[machine->node_of[cpu]] &= ~bit_of(cpu);
    machine->of_node[node] |= bit_of(cpu);
    machine->node_of[cpu] = (uint8_t)node;
}

struct machine *machine_new(const struct machine_shape *shape) {
    struct machine *machine = calloc(1, sizeof *machine);
    if (machine == NULL) {
        return NULL;
    }
    machine->shape = *shape;
    if (!directory_new(&machine->directory) || !directory_new(&machine->pages) ||
        !cache_new(&machine->llc, shape->llc)) {
        machine_delete(machine);
        return NULL;
    }
    for (unsigned cpu = 0; cpu < MACHINE_CPUS; cpu++) {
        machine_set_node(machine, cpu, shape->nodes == 0 ? 0 : cpu % shape->nodes);
    }
    return machine;
}

void machine_delete(struct machine *machine) {
    if (machine == NULL) {
        return;
    }
    for (unsigned i = 0; i < MACHINE_CPUS; i++) {
        cpu_delete(machine->cpus[i]);
    }
    free(machine->llc.entries);
    free(machine->directory.slots);
    free(machine->pages.slots);
    free(machine);
}

static struct cpu *cpu_of(struct machine *machine, unsigned cpu) {
    if (machine->cpus[cpu] == NULL) {
        machine->cpus[cpu] = cpu_new(&machine->shape);
    }
    return machine->cpus[cpu];
}

static bool is_of_another_node(const struct machine *machine, unsigned cpu, unsigned other_plus_one) {
    return other_plus_one != 0 && machine->node_of[cpu] != machine->node_of[other_plus_one - 1];
}

/* Takes a line from all CPUs but one. Returns whether any of them is of another node. */
static bool rob(struct machine *machine, struct holding *holding, unsigned robber, uint64_t line) {
    bits others = holding->holders & ~bit_of(robber);
    for (bits left = others; left != 0; left &= left - 1) {
        struct cpu *other = machine->cpus[lowest_bit(left)];
        cache_drop(&other->l1, line);
        cache_drop(&other->l2, line);
    }
    holding->holders &= ~others;
    holding->robbed |= others;
    holding->last_plus_one = (uint8_t)(robber + 1);
    return (others & ~machine->of_node[machine->node_of[robber]]) != 0;
}

/* A line that this CPU's caches had no room for: a changed one is written back. */
static void evicted(struct machine *machine, unsigned cpu, uint64_t line) {
    cache_drop(&machine->cpus[cpu]->l1, line);
    struct holding *holding = holding_of(&machine->directory, line);
    holding->holders &= ~bit_of(cpu);
    if (holding->changed) {
        holding->changed = false;
        if (cache_use(&machine->llc, line) == NULL) {
            (void)cache_insert(&machine->llc, line);
        }
    }
}

/* Where an access found a line that it had to ask for. */
enum source { NOT_REMOTE, REMOTE_LINE, REMOTE_PAGE };

static enum source source_of(struct machine *machine, unsigned cpu, uint64_t line,
                             const struct holding *holding) {
    if (is_of_another_node(machine, cpu, holding->last_plus_one)) {
        return REMOTE_LINE;
    }
    if (machine->shape.nodes == 0 || holding->holders != 0) {
        return NOT_REMOTE;
    }
    uint64_t page = line / (MACHINE_PAGE_BYTES / MACHINE_LINE_BYTES);
    unsigned first_plus_one = holding_of(&machine->pages, page)->last_plus_one;
    return is_of_another_node(machine, cpu, first_plus_one) ? REMOTE_PAGE : NOT_REMOTE;
}

/* Brings a line into this CPU's L2. */
static enum source fetch(struct machine *machine, unsigned cpu, uint64_t line, unsigned kind) {
    struct cpu *own = machine->cpus[cpu];
    struct holding *holding = holding_of(&machine->directory, line);
    enum source source = source_of(machine, cpu, line, holding);
    bits bit = bit_of(cpu);
    own->counts.l2_misses[kind]++;
    if ((holding->robbed & bit) != 0) {
        own->counts.coherence[kind]++;
        holding->robbed &= ~bit;
    }
    if (holding->changed) {
        /* Its holder keeps it, but may not write without asking. */
        own->counts.transfers[kind]++;
        holding->changed = false;
        entry_t *there = cache_peek(&machine->cpus[lowest_bit(holding->holders)]->l1, line);
        if (there != NULL) {
            *there &= ~writable;
        }
    }
    if (cache_use(&machine->llc, line) == NULL) {
        own->counts.llc_misses[kind] += holding->holders == 0;
        (void)cache_insert(&machine->llc, line);
    }
    holding->holders |= bit;
    holding->last_plus_one = (uint8_t)(cpu + 1);
    entry_t leaves = cache_insert(&own->l2, line);
    if (leaves != 0) {
        evicted(machine, cpu, (leaves >> 1) - 1);
    }
    return source;
}

static void touch_line(struct machine *machine, unsigned cpu, uint64_t line, unsigned kind) {
    struct cpu *own = machine->cpus[cpu];
    entry_t *here = cache_use(&own->l1, line);
    bool was_here = here != NULL;
    enum source source = NOT_REMOTE;
    if (was_here && (kind == MACHINE_LOAD || (*here & writable) != 0)) {
        return;
    }
    if (here == NULL) {
        own->counts.l1_misses[kind]++;
        was_here = cache_use(&own->l2, line) != NULL;
        if (!was_here) {
            source = fetch(machine, cpu, line, kind);
        }
        (void)cache_insert(&own->l1, line);
        here = set_of(&own->l1, line);
    }
    if (kind == MACHINE_STORE) {
        struct holding *holding = holding_of(&machine->directory, line);
        if (holding->holders != bit_of(cpu)) {
            own->counts.upgrades += was_here;
            own->counts.invalidations++;
            source = rob(machine, holding, cpu, line) ? REMOTE_LINE : source;
        }
        holding->changed = true;
        *here |= writable;
    }
    own->counts.remote_lines[kind] += source == REMOTE_LINE;
    own->counts.remote_pages[kind] += source == REMOTE_PAGE;
}

static void touch_page(struct machine *machine, unsigned cpu, uint64_t page, unsigned kind) {
    struct cpu *own = machine->cpus[cpu];
    if (cache_use(&own->tlb, page) != NULL) {
        return;
    }
    own->counts.tlb_misses[kind]++;
    (void)cache_insert(&own->tlb, page);
    if (cache_use(&own->stlb, page) != NULL) {
        return;
    }
    own->counts.walks[kind]++;
    (void)cache_insert(&own->stlb, page);
    if (machine->shape.nodes != 0) {
        struct holding *touched = holding_of(&machine->pages, page);
        touched->last_plus_one = touched->last_plus_one != 0 ? touched->last_plus_one : (uint8_t)(cpu + 1);
    }
}

void machine_access(struct machine *machine, unsigned cpu, uint64_t address, uint64_t bytes, bool is_store) {
    struct cpu *own = cpu_of(machine, cpu);
    unsigned kind = is_store ? MACHINE_STORE : MACHINE_LOAD;
    uint64_t last = address + bytes - 1;
    own->counts.accesses[kind]++;
    for (uint64_t page = address / MACHINE_PAGE_BYTES; page <= last / MACHINE_PAGE_BYTES; page++) {
        touch_page(machine, cpu, page, kind);
    }
    for (uint64_t line = address / MACHINE_LINE_BYTES; line <= last / MACHINE_LINE_BYTES; line++) {
        touch_line(machine, cpu, line, kind);
    }
}

void machine_clear_cpu(struct machine *machine, unsigned cpu) {
    cpu_of(machine, cpu)->counts = (struct machine_counts){0};
}

void machine_clear_counts(struct machine *machine) {
    for (unsigned i = 0; i < MACHINE_CPUS; i++) {
        if (machine->cpus[i] != NULL) {
            machine->cpus[i]->counts = (struct machine_counts){0};
        }
    }
}

const struct machine_counts *machine_counts(const struct machine *machine, unsigned cpu) {
    static const struct machine_counts none;
    return machine->cpus[cpu] != NULL ? &machine->cpus[cpu]->counts : &none;
}
