/*
 * Descriptions of a pointer and of the heap, as text for a debugger:
 * calm_debug_block and calm_debug_heap.
 *
 * A debugger calls them wherever the process stopped: within the allocator, in
 * a signal handler, in a child that was just forked, or while other threads
 * hold every lock. So the functions take no lock, make no system call, and
 * write only to the text. The data that they read may be half changed. Each
 * number is therefore checked against the committed memory before it is used as
 * an index, and no loop relies on the data to end.
 */
#include "api/debug.h"

#include "calmalloc.h"

#include "api/features.h"
#include "api/instance.h"
#include "arena/select.h"
#include "base/size.h"
#include "heap/slab.h"
#include "os/text.h"

/* Static, because the debugger may call on the small stack of a signal handler.
 * The alignment keeps most of it from the pages that each program writes. */
static _Alignas(4096) struct text answer;

/* ---- spans ---- */

/* Returns a bound on page numbers. Pages below it have entries in all
 * tables. */
static size_t described_pages(const struct space *space) {
    const struct address_range *tables = space->page_tables;
    size_t by_class = tables[CLASS_TABLE].committed / sizeof *space->class_of;
    size_t by_span = tables[SPAN_TABLE].committed / sizeof *space->span_of;
    return size_min(size_min(by_class, by_span), tables[USER_TABLE].committed / sizeof *space->users_of);
}

/* Returns the page of an address, or 0 if no segment contains it. Makes a
 * single pass, whereas space_page starts over if another thread splits a
 * segment meanwhile. */
static size_t find_page(const struct space *space, uintptr_t address, bool *usable) {
    size_t count = atomic_load_explicit(&space->segments, memory_order_acquire);
    for (size_t number = 0; number < size_min(count, MAX_SEGMENTS); number++) {
        const struct segment *segment = &space->segment[number];
        size_t offset = address - atomic_load_explicit(&segment->base, memory_order_relaxed);
        if (offset < atomic_load_explicit(&segment->bytes, memory_order_relaxed)) {
            size_t page = atomic_load_explicit(&segment->first_page, memory_order_relaxed) +
                          (offset >> space->page_shift);
            *usable = page < atomic_load_explicit(&segment->page_end, memory_order_relaxed) &&
                      page < described_pages(space);
            return page;
        }
    }
    return 0;
}

/* Returns a bound on the numbers of descriptors. Descriptors below it, except
 * 0, may be read. */
static size_t readable_spans(const struct span_table *table) {
    return table->span_bytes == 0
               ? 0
               : size_min(table->end, table->memory[TABLE_SPANS].committed / table->span_bytes);
}

static bool has_page(const struct span *span, size_t page) {
    return span->state != SPAN_UNUSED && page - span->page < span->pages;
}

/* The entry of a page leads to its span, except within large blocks and runs.
 * There, all spans are searched. */
static const struct span *find_span(const struct space *space, size_t page) {
    size_t end = readable_spans(&space->spans);
    uint32_t recorded = space->span_of[page];
    if (recorded != 0 && recorded < end && has_page(span_at(&space->spans, recorded), page)) {
        return span_at(&space->spans, recorded);
    }
    for (uint32_t number = 1; number < end; number++) {
        if (has_page(span_at(&space->spans, number), page)) {
            return span_at(&space->spans, number);
        }
    }
    return NULL;
}

/* ---- free blocks that the heap counts as used ---- */

struct finds {
    size_t count;
    const char *place; /* where the first one was found */
    unsigned number;
};

static void look_through(struct finds *finds, const char *place, unsigned number, const void *words,
                         size_t count, const void *block) {
    const void *const *pointers = words;
    for (size_t i = 0; i < count; i++) {
        if (pointers[i] == block && finds->count++ == 0) {
            finds->place = place;
            finds->number = number;
        }
    }
}

/* A stack's bottom is hidden while it is flushed. So all pointers between its
 * first word and its top are searched. The blocks of a stack that another thread
 * is moving are not found. */
static void search_cpu_caches(struct finds *finds, uint32_t size_class, const void *block) {
    const struct cpu_caches *caches = &calm_caches;
    for (unsigned number = 0; caches->states != NULL && number < caches->count; number++) {
        const struct cpu_cache_state *state = &caches->states[number];
        size_t start = cpu_cache_start(state, size_class);
        if (atomic_load_explicit(&state->open, memory_order_relaxed) && start != 0) {
            char *cache = cpu_cache_words(caches, state);
            void **first = (void **)(void *)cache + start;
            size_t held = words_between(first, stack_top(stack_of(cache, size_class)));
            bool moves = held > caches->classes->of[size_class].max_grown;
            look_through(finds, "CPU cache", number, first, moves ? 0 : held, block);
        }
    }
}

static void search_depots(struct finds *finds, const struct arenas *arenas, uint32_t size_class,
                          const void *block) {
    for (unsigned number = 0; number < arenas->depot_count && number < MAX_DEPOTS; number++) {
        const struct depot *depot = &arenas->depots[number];
        if (depot->bins != NULL) {
            size_t count = atomic_load_explicit(&depot->bins[size_class].count, memory_order_relaxed);
            look_through(finds, "depot", number, depot->blocks + size_class * depot->bin_blocks,
                         size_min(count, depot->bin_blocks), block);
        }
    }
}

/* ---- one block ---- */

/* Prints "in use", or where a free block is. in_slab: the slab's bitmap says
 * that the block is free. */
static void print_state(struct text *text, const struct finds *finds, bool in_slab, bool claimed) {
    if (finds->count > 0) {
        text_format(text, "free, in %s %u", finds->place, finds->number);
    } else {
        text_format(text, in_slab ? "free, in its slab" : claimed ? "free, in a purge" : "in use");
    }
    if (finds->count + (finds->count > 0 && in_slab) > 1) {
        text_format(text, ", and freed again: %zu times in all", finds->count + in_slab);
    }
}

/* Prints where the pointer is relative to its block. */
static void print_block(struct text *text, const char *pointer, const char *block, size_t bytes,
                        const char *kind) {
    if (pointer == block) {
        text_format(text, ": a %sblock of %zu bytes", kind, bytes);
    } else if (pointer < block) {
        text_format(text, ": %zu bytes before the %sblock %p of %zu bytes, in its pages",
                    (size_t)(block - pointer), kind, (const void *)block, bytes);
    } else {
        text_format(text, ": %zu bytes into the %sblock %p of %zu bytes", (size_t)(pointer - block), kind,
                    (const void *)block, bytes);
    }
}

static void print_in_slab(struct text *text, const struct arenas *arenas, const struct span *slab,
                          size_t page, const char *base, const char *pointer) {
    const struct heap *heap = heap_of(arenas, pointer);
    uint32_t size_class = slab->size_class;
    const struct size_class *of = &heap->classes->of[size_class < SIZE_CLASSES ? size_class : 0];
    size_t number = size_class_block_at(of, (size_t)(pointer - base));
    size_t bitmap_words = (heap->space.spans.span_bytes - sizeof *slab) / sizeof *slab->allocated;
    const char *block = base + number * of->size;
    if (of->size == 0) {
        text_format(text, "in a slab that is being made or closed");
    } else if (number >= of->slab_blocks || number / 64 >= bitmap_words) {
        text_format(text, "behind the last block of %u bytes", of->size);
    } else {
        struct finds finds = {0};
        search_cpu_caches(&finds, size_class, block);
        search_depots(&finds, arenas, size_class, block);
        bool is_used = slab_has(slab, number);
        print_state(text, &finds, !is_used, slab->claimed && heap_claims(heap, block, of->size));
        print_block(text, pointer, block, of->size, "");
    }
    text_format(text, "; slab %p of %zu bytes, %u of %u blocks in use or cached; %s page", (const void *)base,
                (size_t)slab->pages << heap->space.page_shift, slab->used_blocks, of->slab_blocks,
                (heap->space.users_of[page] & PAGE_DIRTY) != 0 ? "dirty" : "clean");
}

static void print_in_large(struct text *text, const struct arenas *arenas, const struct span *span,
                           const char *base, const char *pointer) {
    size_t offset = size_min(span->offset, page_bytes(arenas));
    struct finds finds = {0};
    print_state(text, &finds, false, false);
    print_block(text, pointer, base + offset, ((size_t)span->pages << page_shift(arenas)) - offset, "large ");
    text_format(text, "; %u pages from %p%s", span->pages, (const void *)base,
                span->huge ? " in a huge-page region" : "");
}

/* Returns false if the pointer is in no heap. */
static bool print_in_heap(struct text *text, const struct arenas *arenas, const char *pointer) {
    const struct space *space = &heap_of(arenas, pointer)->space;
    bool usable = false;
    size_t page = find_page(space, (uintptr_t)pointer, &usable);
    if (page == 0) {
        return false;
    }
    const struct span *span = usable ? find_span(space, page) : NULL;
    if (span == NULL) {
        text_format(text, usable ? "in pages of the heap that no span describes at present"
                                 : "in address space that the heap has only reserved");
        return true;
    }
    size_t within = (uintptr_t)pointer & (space->page_size - 1);
    const char *base = pointer - within - ((page - span->page) << space->page_shift);
    if (span->state == SPAN_SLAB) {
        print_in_slab(text, arenas, span, page, base, pointer);
    } else if (span->state == SPAN_LARGE) {
        print_in_large(text, arenas, span, base, pointer);
    } else {
        text_format(text, "%s run of %u pages from %p",
                    span->state == SPAN_DIRTY   ? "free: in a dirty"
                    : span->state == SPAN_CLEAN ? "free: in a clean"
                                                : "in a purge, or taken by a thread within the heap: in a",
                    span->pages, (const void *)base);
    }
    return true;
}

void debug_describe(const void *pointer, struct text *text) {
    text_format(text, "%p: ", pointer);
    if (!allocator_is_ready() || !print_in_heap(text, &calm_arenas, pointer)) {
        text_format(text, pointer == NULL ? "NULL" : "not in a heap of calmalloc");
    } else if (lock_is_held(&arena_of(&calm_arenas, pointer)->lock)) {
        text_format(text, "; the heap's lock is held");
    }
}

const char *calm_debug_block(const void *pointer) {
    answer.length = 0;
    debug_describe(pointer, &answer);
    return answer.bytes;
}

/* ---- the heap ---- */

/* A lock stores the thread pointer of its owner, which therefore names the
 * thread. */
static void print_lock(struct text *text, const char *name, unsigned number, const struct lock *lock) {
    uint64_t state = atomic_load_explicit(&lock->state, memory_order_relaxed);
    text_format(text, name, number);
    if (state == LOCK_FREE) {
        text_format(text, " free\n");
        return;
    }
    text_format(text, " held by thread %p%s%s%s\n", (const void *)(uintptr_t)(state & LOCK_OWNER),
                lock_is_mine(lock) ? ", the caller" : "", (state & LOCK_WAITED) != 0 ? ", waited for" : "",
                (state & LOCK_FORK) != 0 || state >= LOCK_KEPT ? ", over a fork" : "");
}

static void print_held(struct text *text, const char *name, unsigned number, const struct lock *lock) {
    if (lock_is_held(lock)) {
        print_lock(text, name, number, lock);
    }
}

static void print_heap(struct text *text, const struct arena *arena, unsigned number) {
    const struct heap *heap = &arena->heap;
    const struct space *space = &heap->space;
    const struct run_set *sets = heap->runs.sets;
    size_t spans[SPAN_LARGE + 1] = {0};
    size_t end = readable_spans(&space->spans);
    for (uint32_t span = 1; span < end; span++) {
        unsigned state = span_at(&space->spans, span)->state;
        spans[state <= SPAN_LARGE ? state : SPAN_UNUSED]++;
    }
    size_t page = space->page_size / 1024;
    text_format(text, "heap %u\n", number);
    text_format(text, "  used     %zu KiB; slabs: %zu, large blocks: %zu; with the blocks in caches\n",
                heap_used_pages(heap) * page, spans[SPAN_SLAB], spans[SPAN_LARGE]);
    text_format(text, "  dirty    %zu KiB; runs: %zu, within slabs: %zu KiB\n", heap_dirty_pages(heap) * page,
                spans[SPAN_DIRTY], heap->slab_dirty_pages * page);
    text_format(text, "  purging  %zu KiB\n", heap->purging_pages * page);
    text_format(text, "  clean    %zu KiB; runs: %zu\n",
                (sets[RUN_CLEAN].pages + sets[RUN_HUGE_CLEAN].pages) * page, spans[SPAN_CLEAN]);
    print_lock(text, "  the heap's lock:", 0, &arena->lock);
}

static void print_arenas(struct text *text, const struct arenas *arenas) {
    unsigned next = 0;
    for (const struct arena *arena; (arena = arena_next(arenas, &next)) != NULL;) {
        print_heap(text, arena, next - 1);
    }
    text_format(text, "all heaps\n  limit    %zu KiB of dirty memory\n",
                get_total(&arenas->limit.pages) * page_bytes(arenas) / 1024);
    for (unsigned i = 0; i < arenas->depot_count && i < MAX_DEPOTS; i++) {
        size_t bytes;
        size_t blocks = depot_blocks(&arenas->depots[i], &bytes);
        text_format(text, "  depot %u  %zu KiB; blocks: %zu\n", i, bytes / 1024, blocks);
    }
    print_lock(text, "  the purger's lock:", 0, &arenas->purger.lock);
    print_held(text, "  the lock for the start of a heap:", 0, &arenas->start_lock);
    for (unsigned i = 0; i < arenas->depot_count && i < MAX_DEPOTS; i++) {
        const struct depot *depot = &arenas->depots[i];
        for (uint32_t size_class = 1; depot->bins != NULL && size_class < calm_all_classes.count;
             ++size_class) {
            print_held(text, "  the lock of a depot's bin of class %u:", size_class,
                       &depot->bins[size_class].lock);
        }
    }
    uint32_t helper = atomic_load_explicit(&arenas->helper.thread.id, memory_order_relaxed);
    if (helper != 0) {
        text_format(text, "  helper: LWP %u\n", helper);
    }
}

static void print_caches(struct text *text) {
    const struct cpu_caches *caches = &calm_caches;
    int mode = atomic_load_explicit(&caches->mode, memory_order_relaxed);
    size_t bytes;
    size_t blocks = cpu_caches_blocks(caches, &bytes);
    text_format(text, "CPU caches (%s): %zu KiB; blocks: %zu\n",
                mode == CACHE_RSEQ     ? "restartable sequences"
                : mode == CACHE_LOCKED ? "locks"
                                       : "off",
                bytes / 1024, blocks);
    print_held(text, "  the lock under which CPU caches are opened:", 0, &caches->opening);
    for (unsigned number = 0; caches->states != NULL && number < caches->count; number++) {
        print_held(text, "  the lock of CPU cache %u:", number, &caches->states[number].lock);
    }
}

const char *calm_debug_heap(void) {
    struct text *text = &answer;
    text->length = 0;
    text_format(text, "calmalloc " CALM_RELEASE "%s\n", allocator_is_ready() ? "" : " has not started");
    if (allocator_is_ready()) {
        print_arenas(text, &calm_arenas);
        print_caches(text);
    }
    return answer.bytes;
}
