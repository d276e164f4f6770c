#include "layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PAGE_BYTES = 64 * 1024,
    LARGEST = PAGE_BYTES / 2, /* in a page with others; larger ones have pages of their own */
    EXTENSION_BYTES = 4096,   /* of a page are written down at once */
    CLASSES = 8 + 4 * 8,      /* 16 to 128 in steps of 16; then four to each doubling */
    LARGE_RUNS = 4096,        /* pages in a run that is kept for its size */
    MOST_BLOCKS = PAGE_BYTES / 16,
    DESCRIPTOR_BYTES = 64, /* of a page: a line */
    INDEX_BYTES = 2,
    NONE = 0,
};

/* Where things are: far from all that a program has. A page's number is its place in each. */
static const uint64_t blocks_begin = 1ULL << 50;
static const uint64_t descriptors_begin = 2ULL << 50;
static const uint64_t indices_begin = 3ULL << 50;
static const uint64_t map_begin = 4ULL << 50;
static const uint64_t heads_begin = 5ULL << 50;
static const uint64_t mailboxes_begin = 6ULL << 50;
static const uint64_t rings_begin = 7ULL << 50;

struct page {
    uint32_t block_bytes; /* 0: of a run of a large block, which run_pages is the length of */
    uint32_t run_pages;
    uint32_t class;
    uint32_t blocks;   /* that there is room for */
    uint32_t extended; /* that were written down */
    uint32_t free;     /* of those, now free: the stack's height */
    uint32_t next;     /* page with free blocks, of the same class; or free run, of the same length */
    bool listed;
    uint16_t *stack; /* the same in both layouts */
};

struct ring {
    uint32_t first; /* the next word that the allocator reads */
    uint32_t count;
    uint64_t words[LAYOUT_RING_WORDS];
};

struct layout {
    struct layout_kind kind;
    struct machine *machine;
    struct page *pages; /* number 0 is not used: NONE */
    uint32_t page_count;
    uint32_t page_room;
    uint32_t with_free[CLASSES];
    uint32_t runs[LARGE_RUNS + 1];
    struct ring rings[MACHINE_CPUS];
    uint64_t message_misses;
};

struct layout *layout_new(struct layout_kind kind, struct machine *machine) {
    struct layout *layout = calloc(1, sizeof *layout);
    if (layout != NULL) {
        layout->kind = kind;
        layout->machine = machine;
        layout->page_count = 1;
    }
    return layout;
}

void layout_delete(struct layout *layout) {
    if (layout != NULL) {
        for (uint32_t i = 1; i < layout->page_count; i++) {
            free(layout->pages[i].stack);
        }
        free(layout->pages);
        free(layout);
    }
}

uint64_t layout_message_misses(const struct layout *layout) {
    return layout->message_misses;
}

static void *checked(void *block) {
    if (block == NULL) {
        fputs("calm-trace-replay: out of memory\n", stderr);
        exit(1);
    }
    return block;
}

/* What the allocator itself loads and stores, on the CPU that it runs on. */

struct caller {
    struct layout *layout;
    unsigned cpu;
};

static void load(struct caller on, uint64_t address, uint64_t bytes) {
    machine_access(on.layout->machine, on.cpu, address, bytes, false);
}

static void store(struct caller on, uint64_t address, uint64_t bytes) {
    machine_access(on.layout->machine, on.cpu, address, bytes, true);
}

static uint64_t descriptor(uint32_t page) {
    return descriptors_begin + (uint64_t)page * DESCRIPTOR_BYTES;
}

static uint64_t next_of(uint32_t page) {
    return descriptor(page) + sizeof(uint64_t);
}

static uint64_t head_of(uint32_t class) {
    return heads_begin + (uint64_t) class * sizeof(uint64_t);
}

static uint64_t block_at(const struct layout *layout, uint32_t page, uint32_t index) {
    return blocks_begin + (uint64_t)page * PAGE_BYTES + (uint64_t)index * layout->pages[page].block_bytes;
}

/* Where it is written down that a block is free, as the height-th of its page. */
static void write_down(struct caller on, uint32_t page, uint32_t height, uint32_t index) {
    if (on.layout->kind.segregated) {
        store(on, indices_begin + ((uint64_t)page * MOST_BLOCKS + height) * INDEX_BYTES, INDEX_BYTES);
    } else {
        store(on, block_at(on.layout, page, index), sizeof(uint64_t));
    }
}

static void read_back(struct caller on, uint32_t page, uint32_t height, uint32_t index) {
    if (on.layout->kind.segregated) {
        load(on, indices_begin + ((uint64_t)page * MOST_BLOCKS + height) * INDEX_BYTES, INDEX_BYTES);
    } else {
        load(on, block_at(on.layout, page, index), sizeof(uint64_t));
    }
}

/* Sizes. */

static uint32_t class_of(uint64_t bytes) {
    if (bytes <= 128) {
        return bytes == 0 ? 0 : (uint32_t)(bytes - 1) / 16;
    }
    /* (128, 160], (160, 192], … (28 KiB, 32 KiB]. */
    uint32_t doubling = 63 - (uint32_t)__builtin_clzll(bytes - 1);
    return 8 + (doubling - 7) * 4 + (uint32_t)(((bytes - 1) >> (doubling - 2)) & 3);
}

static uint32_t class_bytes(uint32_t class) {
    if (class < 8) {
        return (class + 1) * 16;
    }
    uint32_t base = 128U << ((class - 8) / 4);
    return base + base / 4 * ((class - 8) % 4 + 1);
}

static uint32_t new_pages(struct layout *layout, uint32_t count) {
    if (layout->page_count + count > layout->page_room) {
        layout->page_room = (layout->page_count + count) * 2;
        layout->pages = checked(realloc(layout->pages, layout->page_room * sizeof *layout->pages));
    }
    uint32_t first = layout->page_count;
    memset(&layout->pages[first], 0, count * sizeof *layout->pages);
    layout->page_count += count;
    return first;
}

/* The work, on whichever CPU. */

static void extend(struct caller on, uint32_t number) {
    struct page *page = &on.layout->pages[number];
    uint32_t more = EXTENSION_BYTES / page->block_bytes;
    more = more == 0 ? 1 : more;
    uint32_t end = page->extended + more < page->blocks ? page->extended + more : page->blocks;
    /* The lowest comes out first. */
    for (uint32_t index = end; index-- > page->extended;) {
        write_down(on, number, page->free, index);
        page->stack[page->free++] = (uint16_t)index;
    }
    page->extended = end;
}

static uint32_t page_with_room(struct caller on, uint32_t class) {
    struct layout *layout = on.layout;
    load(on, head_of(class), sizeof(uint64_t));
    uint32_t number = layout->with_free[class];
    if (number == NONE) {
        number = new_pages(layout, 1);
        struct page *page = &layout->pages[number];
        page->class = class;
        page->block_bytes = class_bytes(class);
        page->blocks = PAGE_BYTES / page->block_bytes;
        page->stack = checked(malloc(page->blocks * sizeof *page->stack));
        page->listed = true;
        layout->with_free[class] = number;
        store(on, map_begin + (uint64_t)number * sizeof(uint64_t), sizeof(uint64_t));
        store(on, head_of(class), sizeof(uint64_t));
    }
    if (layout->pages[number].free == 0) {
        extend(on, number);
    }
    return number;
}

static uint64_t take_small(struct caller on, uint32_t class) {
    struct layout *layout = on.layout;
    uint32_t number = page_with_room(on, class);
    struct page *page = &layout->pages[number];
    load(on, descriptor(number), sizeof(uint64_t));
    uint32_t index = page->stack[--page->free];
    read_back(on, number, page->free, index);
    store(on, descriptor(number), sizeof(uint64_t));
    if (page->free == 0 && page->extended == page->blocks) {
        load(on, next_of(number), sizeof(uint64_t));
        store(on, head_of(class), sizeof(uint64_t));
        layout->with_free[class] = page->next;
        page->listed = false;
    }
    return block_at(layout, number, index);
}

static void give_small(struct caller on, uint32_t number, uint32_t index) {
    struct layout *layout = on.layout;
    struct page *page = &layout->pages[number];
    load(on, descriptor(number), sizeof(uint64_t));
    write_down(on, number, page->free, index);
    page->stack[page->free++] = (uint16_t)index;
    store(on, descriptor(number), sizeof(uint64_t));
    if (!page->listed) {
        load(on, head_of(page->class), sizeof(uint64_t));
        store(on, next_of(number), sizeof(uint64_t));
        store(on, head_of(page->class), sizeof(uint64_t));
        page->next = layout->with_free[page->class];
        layout->with_free[page->class] = number;
        page->listed = true;
    }
}

static uint64_t take_large(struct caller on, uint64_t bytes) {
    struct layout *layout = on.layout;
    uint32_t pages = (uint32_t)((bytes + PAGE_BYTES - 1) / PAGE_BYTES);
    uint32_t number = pages <= LARGE_RUNS ? layout->runs[pages] : NONE;
    load(on, head_of(CLASSES), sizeof(uint64_t));
    if (number == NONE) {
        number = new_pages(layout, pages);
        layout->pages[number].run_pages = pages;
        store(on, map_begin + (uint64_t)number * sizeof(uint64_t), sizeof(uint64_t));
    } else {
        load(on, next_of(number), sizeof(uint64_t));
        layout->runs[pages] = layout->pages[number].next;
    }
    store(on, descriptor(number), sizeof(uint64_t));
    store(on, head_of(CLASSES), sizeof(uint64_t));
    return blocks_begin + (uint64_t)number * PAGE_BYTES;
}

static void give_large(struct caller on, uint32_t number) {
    struct layout *layout = on.layout;
    struct page *page = &layout->pages[number];
    load(on, descriptor(number), sizeof(uint64_t));
    load(on, head_of(CLASSES), sizeof(uint64_t));
    store(on, next_of(number), sizeof(uint64_t));
    store(on, head_of(CLASSES), sizeof(uint64_t));
    if (page->run_pages <= LARGE_RUNS) {
        page->next = layout->runs[page->run_pages];
        layout->runs[page->run_pages] = number;
    }
}

static uint64_t take(struct caller on, uint64_t bytes) {
    return bytes <= LARGEST ? take_small(on, class_of(bytes)) : take_large(on, bytes);
}

static void give(struct caller on, uint64_t block) {
    uint32_t number = (uint32_t)((block - blocks_begin) / PAGE_BYTES);
    if (on.layout->kind.segregated) {
        /* The way from a block to where it is written down. */
        load(on, map_begin + (uint64_t)number * sizeof(uint64_t), sizeof(uint64_t));
    }
    const struct page *page = &on.layout->pages[number];
    if (page->block_bytes == 0) {
        give_large(on, number);
    } else {
        give_small(on, number, (uint32_t)((block - blocks_begin) % PAGE_BYTES) / page->block_bytes);
    }
}

/* Messages. */

static uint64_t private_misses(struct caller user) {
    const struct machine_counts *counts = machine_counts(user.layout->machine, user.cpu);
    return counts->l2_misses[MACHINE_LOAD] + counts->l2_misses[MACHINE_STORE] + counts->upgrades;
}

static void say(struct caller user, uint64_t address, bool is_store) {
    uint64_t before = private_misses(user);
    machine_access(user.layout->machine, user.cpu, address, sizeof(uint64_t), is_store);
    user.layout->message_misses += private_misses(user) - before;
}

static uint64_t word_of(unsigned cpu, uint32_t place) {
    return rings_begin + ((uint64_t)cpu * LAYOUT_RING_WORDS + place) * sizeof(uint64_t);
}

static void drain(struct caller server, unsigned cpu) {
    struct ring *ring = &server.layout->rings[cpu];
    for (; ring->count > 0; ring->count--) {
        load(server, word_of(cpu, ring->first), sizeof(uint64_t));
        store(server, word_of(cpu, ring->first), sizeof(uint64_t));
        give(server, ring->words[ring->first]);
        ring->first = (ring->first + 1) % LAYOUT_RING_WORDS;
    }
}

uint64_t layout_malloc(struct layout *layout, unsigned cpu, uint64_t bytes) {
    struct caller user = {layout, cpu};
    if (!layout->kind.offloaded) {
        return take(user, bytes);
    }
    struct caller server = {layout, LAYOUT_SERVER};
    uint64_t mailbox = mailboxes_begin + (uint64_t)cpu * MACHINE_LINE_BYTES;
    say(user, mailbox, true);
    drain(server, cpu);
    load(server, mailbox, sizeof(uint64_t));
    uint64_t block = take(server, bytes);
    store(server, mailbox + sizeof(uint64_t), sizeof(uint64_t));
    say(user, mailbox + sizeof(uint64_t), false);
    return block;
}

void layout_free(struct layout *layout, unsigned cpu, uint64_t block) {
    if (!layout->kind.offloaded) {
        give((struct caller){layout, cpu}, block);
        return;
    }
    struct ring *ring = &layout->rings[cpu];
    uint32_t place = (ring->first + ring->count++) % LAYOUT_RING_WORDS;
    ring->words[place] = block;
    say((struct caller){layout, cpu}, word_of(cpu, place), true);
    if (ring->count == LAYOUT_RING_WORDS) {
        drain((struct caller){layout, LAYOUT_SERVER}, cpu);
    }
}
