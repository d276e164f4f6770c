#include "api/allocator.h"

#include "api/colored.h"
#include "api/door.h"
#include "api/misuse.h"
#include "api/offloading.h"
#include "api/options.h"
#include "api/placing.h"
#include "api/profiling.h"
#include "api/requests.h"
#include "api/sanitizer.h"
#include "api/statistics.h"
#include "governor/helper.h"
#include "os/filters.h"
#include "os/lock.h"
#include "os/stdio.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define CACHE_LINE_BYTES 64

struct size_classes calm_classes;
/* The same, whole at any time. */
static struct size_classes classes;
struct governor calm_governor;

static size_t memory_bytes; /* of the machine */

static struct lock ready_lock;
static _Atomic(bool) ready;

/* Fixed once: the fast paths know no other change of mode. */
static enum cache_mode choose_mode(struct rseq_place place, bool have_caches) {
    int wanted = options_cache();
    if (!have_caches || wanted == OPTION_CACHE_OFF || offloading_mode() == OFFLOADING_SYNC) {
        return CACHE_OFF;
    }
    /* Without a way to stop the sequences, caches could not be emptied. */
    bool restartable = wanted == OPTION_CACHE_AUTO && calm_caches.one_each && place.usable;
    return restartable && rseq_restart_all() ? CACHE_RSEQ : CACHE_LOCKED;
}

/*
 * Whether there is no thread beside the forking one, not even one of ours: then no lock can be held but by
 * itself, in what a signal interrupted, and all stays as it is. A lone thread has nothing to wait for, and
 * the fewer pages are written around a fork, the fewer are copied.
 */
static bool forks_alone(void) {
    return thread_is_alone() && !governor_has_helper(&calm_governor) && offloading_mode() == OFFLOADING_NONE;
}

/* As before_fork found it: in between a helper may end, and a signal handler may fork in its turn. Threads of
 * ours use no files. */
static bool forked_alone;
static bool forked_with_files;
static unsigned forks_with_locks; /* one within another */

static void before_fork(void) {
    if (forks_with_locks == 0 && forks_alone()) {
        if (!forked_alone) {
            forked_alone = true;
        }
        /* No helper starts meanwhile, either: another fork handler may free so much that it would. */
        helper_hold();
        return;
    }
    lock_wake_sleepers();
    if (offloading_mode() == OFFLOADING_NONE) {
        governor_shrink_for_fork(&calm_governor);
    }
    forked_with_files = !thread_is_alone();
    if (forked_with_files) {
        stdio_before_fork();
    }
    profiling_before_fork();
    offloading_before_fork();
    governor_before_fork(&calm_governor);
    forks_with_locks++;
    forked_alone = false;
}

static void after_fork_in_parent(void) {
    if (forked_alone) {
        helper_resume();
        return;
    }
    forks_with_locks--;
    governor_after_fork(&calm_governor, false);
    offloading_after_fork(false);
    profiling_after_fork();
    if (forked_with_files) {
        stdio_after_fork_in_parent();
    }
}

static void after_fork_in_child(void) {
    if (forked_alone) {
        governor_start_child(&calm_governor);
        placing_after_fork();
        requests_after_fork();
        return;
    }
    forks_with_locks--;
    governor_after_fork(&calm_governor, true);
    placing_after_fork();
    offloading_after_fork(true);
    profiling_after_fork();
    colored_after_fork();
    requests_after_fork();
    if (forked_with_files) {
        stdio_after_fork_in_child();
    }
}

static size_t trim_by_helper(size_t keep_bytes) {
    return governor_trim_by_helper(&calm_governor, keep_bytes);
}

/* By the helper, which runs only where there is no server. */
static void visited(void) {
    requests_notice(trim_by_helper);
}

bool allocator_ready(void) {
    if (atomic_load_explicit(&ready, memory_order_acquire)) {
        return true;
    }
    if (sanitizer_is_there()) {
        return false;
    }
    int saved_errno = errno;
    bool first = false;
    lock_acquire(&ready_lock);
    if (!atomic_load_explicit(&ready, memory_order_relaxed)) {
        filters_look();
        struct rseq_place place = rseq_find();
        memory_bytes = os_memory_bytes();
        options_read();
        size_classes_fill(&classes, os_page_size());
        bool have_caches = cpu_caches_init(&calm_caches, &classes, place);
        bool offloads = have_caches && offloading_choose() != OFFLOADING_NONE;
        enum cache_mode mode = choose_mode(place, have_caches);
        if (governor_init(&calm_governor, &classes, &calm_caches, ALLOCATOR_SPACE_BYTES, mode != CACHE_OFF,
                          misuse_report)) {
            /*
             * Only now the fast paths learn of it, the mode last: until then they find class 0, or no cache.
             * The release on ready is for whoever comes the slow way; a fast path that sees the mode without
             * the rest would need a processor that reorders stores, where there are no restartable sequences
             * here.
             */
            offloads = offloads && offloading_prepare();
            calm_governor.visited = visited;
            cpu_caches_start(&calm_caches, mode, !offloads);
            if (!filters_allow_all()) {
                governor_read_room(&calm_governor); /* later it may not be read any more */
            }
            calm_classes = classes;
            atomic_store_explicit(&ready, true, memory_order_release);
            first = true;
        }
    }
    lock_release(&ready_lock);
    if (first) {
        /*
         * As early as can be: what is registered later runs before ours, which then holds all locks. A
         * handler that was registered earlier runs while they are held, and may allocate nevertheless: see
         * os/lock.h.
         */
        pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
        options_apply_profile();
    }
    errno = saved_errno;
    return atomic_load_explicit(&ready, memory_order_relaxed);
}

/*
 * A program that never allocates forks, too; and the environment is there now, if it was not before. Before
 * the other constructors glibc's environ is not set, but glibc passes the environment, which not every C
 * library does.
 */
__attribute__((constructor(101))) static void prepare(int argc, char **argv, char **environment) {
    (void)argc, (void)argv;
    if (environ == NULL) {
        options_keep_environment(environment);
    }
    if (allocator_ready()) {
        options_read_late();
        statistics_prepare_report();
    }
}

void *out_of_memory(void) {
    errno = ENOMEM;
    return NULL;
}

void allocator_use_fast_path(bool use) {
    for (size_t i = 0; i < sizeof classes.small; i++) {
        __atomic_store_n(&calm_classes.small[i], use ? classes.small[i] : 0, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&calm_classes.size_most, use ? classes.size_most : 0, __ATOMIC_RELAXED);
}

/* The class of a size that has one, 0 for none, once the allocator is ready. */
static uint32_t class_of(size_t size) {
    return size <= classes.size_most ? size_class_of(&classes, size) : 0;
}

static size_t pages_for(size_t size) {
    size_t shift = calm_governor.heap.space.page_shift;
    return (size + ((size_t)1 << shift) - 1) >> shift;
}

/* More than the machine has: whether that can be had is the kernel's policy, which asks nothing of address
 * space that is reserved. */
static bool is_too_large(size_t size) {
    return size > PTRDIFF_MAX || (size > memory_bytes && !os_would_map(size));
}

static void *take_pages(size_t size, size_t alignment, bool zeroed, bool *zero) {
    if (is_too_large(size)) {
        return out_of_memory();
    }
    size_t page = calm_governor.heap.space.page_size;
    size_t align_pages = alignment <= page ? 1 : alignment / page;
    size_t pages = pages_for(size) + placing_pages(size, alignment);
    void *base = door_take_large(pages, align_pages, zeroed, zero);
    if (base == NULL) {
        /* What lies in caches may make room; and nothing is spent on where it begins. */
        door_trim(SIZE_MAX);
        base = door_take_large(pages_for(size), align_pages, zeroed, zero);
    }
    return base == NULL ? out_of_memory() : placing_place(base, size, alignment);
}

static void *allocate_large(size_t size, size_t alignment, bool zeroed, bool *zero) {
    bool sampled = profiling_is_on() && profiling_counts(size);
    void *block = take_pages(size, alignment, zeroed, zero);
    if (sampled && block != NULL) {
        profiling_note(block, size);
    }
    return block;
}

/* Into the cache of whichever CPU this is, and what finds no room there back. */
static void stock(uint32_t class, void *const *blocks, size_t count) {
    size_t pushed = count == 0 ? 0 : cpu_cache_push_some(class, blocks, count);
    if (pushed < count) {
        door_put_blocks(class, blocks + pushed, count - pushed);
    }
}

/* A block of a class whose cache is empty: a magazine, of which one block is the caller's. */
static void *refill(uint32_t class) {
    cpu_cache_open(&calm_caches, class);
    void *blocks[MAGAZINE_BLOCKS_MOST];
    if (cpu_cache_pop_some(class, blocks, 1) == 1) {
        return blocks[0];
    }
    cpu_cache_ran_empty(class);
    bool cached = atomic_load_explicit(&calm_caches.mode, memory_order_relaxed) != CACHE_OFF;
    size_t wanted = cached ? cpu_cache_magazine(class) : 1;
    struct taken taken = door_take_blocks(class, blocks, wanted);
    if (taken.count == 0) {
        /* What lies in other caches may be of this class, or make room for it. */
        door_trim(SIZE_MAX);
        taken = door_take_blocks(class, blocks, 1);
        if (taken.count == 0) {
            return out_of_memory();
        }
    }
    void *block = blocks[--taken.count];
    stock(class, blocks, taken.count);
    return block;
}

/* A block of a class while the heap is profiled: of pages of its own if it is sampled, and aligned as any of
 * its class may be. */
static void *allocate_counted(size_t size, uint32_t class) {
    if (profiling_counts(size)) {
        bool zero;
        void *block = take_pages(size == 0 ? 1 : size, os_page_size(), false, &zero);
        if (block != NULL) {
            profiling_note(block, size);
        }
        return block;
    }
    void *block;
    return cpu_cache_is_rseq() && rseq_pop(class, &block) ? block : refill(class);
}

/* Apart, so that the compiler leaves allocate_slow in one piece: profiles drop its frame by its name. */
__attribute__((noinline)) static void *allocate_elsewhere(size_t size) {
    return sanitizer_is_there() ? __interceptor_malloc(size) : out_of_memory();
}

void *allocate_slow(size_t size) {
    if (!allocator_ready()) {
        return allocate_elsewhere(size);
    }
    uint32_t class = class_of(size);
    bool zero;
    if (class == 0) {
        return allocate_large(size, SIZE_QUANTUM, false, &zero);
    }
    return profiling_is_on() ? allocate_counted(size, class) : refill(class);
}

/*
 * A block of a class whose cache is full: a magazine leaves it. Where the cache is only just opened, a small
 * block goes below a magazine of others: a thread that frees what another one gave it does not get it back at
 * once, to write to a cache line that it shares with the block's neighbours (passive false sharing: Berger et
 * al., "Hoard").
 */
static void spill(uint32_t class, void *block) {
    void *blocks[MAGAZINE_BLOCKS_MOST];
    if (cpu_cache_is_newest(class, block)) {
        misuse_report(MISUSE_DOUBLE_FREE, block);
        return;
    }
    if (cpu_cache_open(&calm_caches, class) && calm_classes.of[class].size < CACHE_LINE_BYTES) {
        stock(class, &block, 1);
        struct taken taken = door_take_blocks(class, blocks, calm_classes.of[class].batch);
        if (taken.cacheable) {
            stock(class, blocks, taken.count);
        } else if (taken.count > 0) {
            door_put_blocks(class, blocks, taken.count);
        }
        return;
    }
    if (cpu_cache_push_some(class, &block, 1) == 1 ||
        (cpu_cache_ran_full(class) && cpu_cache_push_some(class, &block, 1) == 1)) {
        return;
    }
    size_t count = cpu_cache_pop_some(class, blocks, cpu_cache_magazine(class));
    blocks[count++] = block;
    door_put_blocks(class, blocks, count);
}

void release_slow(void *block) {
    if (block == NULL) {
        return;
    }
    struct heap *heap = allocator_ready() ? door_heap_of(block) : NULL;
    if (heap == NULL && sanitizer_is_there()) {
        __interceptor_free(block);
        return;
    }
    uint32_t page = heap == NULL ? 0 : space_page(&heap->space, block);
    if (page == 0 || !space_is_usable(&heap->space, page)) {
        misuse_report(MISUSE_INVALID_FREE, block);
        return;
    }
    uint32_t class = heap->space.class_of[page];
    if (class == 0) {
        profiling_forget(block); /* before another thread may have it */
        door_put_large(block);
    } else if ((uintptr_t)block % SIZE_QUANTUM != 0) {
        misuse_report(MISUSE_INVALID_FREE, block);
    } else if (heap == &calm_governor.heap) {
        spill(class, block);
    } else {
        door_put_blocks(class, &block, 1);
    }
}

/* Blocks of a class lie at multiples of its size from a page's start: aligned if the size is a multiple. */
static uint32_t aligned_class(size_t alignment, size_t size) {
    uint32_t class = class_of(size < alignment ? alignment : size);
    while (class != 0 && class < calm_classes.count && calm_classes.of[class].size % alignment != 0) {
        ++class;
    }
    return class < calm_classes.count ? class : 0;
}

void *allocate_aligned(size_t alignment, size_t size) {
    if (alignment <= SIZE_QUANTUM) {
        return allocate(size);
    }
    if (!allocator_ready() && sanitizer_is_there()) {
        return __interceptor_memalign(alignment, size);
    }
    if (!allocator_ready() || size > PTRDIFF_MAX || alignment > PTRDIFF_MAX) {
        return out_of_memory();
    }
    size_t page = calm_governor.heap.space.page_size;
    uint32_t class = alignment <= page ? aligned_class(alignment, size) : 0;
    if (class != 0) {
        return allocate(calm_classes.of[class].size);
    }
    bool zero;
    return allocate_large(size == 0 ? 1 : size, alignment, false, &zero);
}

void *allocate_zeroed(size_t count, size_t size) {
    size_t bytes;
    if (!allocator_ready()) {
        return sanitizer_is_there() ? __interceptor_calloc(count, size) : out_of_memory();
    }
    if (__builtin_mul_overflow(count, size, &bytes)) {
        return out_of_memory();
    }
    bool zero = false;
    void *block = class_for(bytes) != 0  ? allocate(bytes)
                  : class_of(bytes) != 0 ? allocate_slow(bytes)
                                         : allocate_large(bytes, SIZE_QUANTUM, true, &zero);
    if (block != NULL && !zero) {
        memset(block, 0, bytes);
    }
    return block;
}

size_t usable_size(const void *block) {
    const struct heap *heap = block == NULL || !allocator_ready() ? NULL : door_heap_of(block);
    if (heap == NULL && sanitizer_is_there()) {
        return __interceptor_malloc_usable_size((void *)(uintptr_t)block);
    }
    uint32_t page = heap == NULL ? 0 : space_page(&heap->space, block);
    if (page == 0 || !space_is_usable(&heap->space, page)) {
        return 0;
    }
    uint32_t class = heap->space.class_of[page];
    if (class != 0) {
        return classes.of[class].size;
    }
    const struct span *span = heap_large_span(heap, block);
    return span == NULL ? 0 : ((size_t)span->pages << heap->space.page_shift) - span->offset;
}

/* A block that may stay where it is: no smaller than asked, and not twice as large. */
static bool fits(size_t held, size_t size) {
    return size <= held && size > held / 2;
}

void *reallocate(void *block, size_t size) {
    if (block == NULL) {
        return allocate(size);
    }
    if (size == 0) {
        release(block);
        return NULL;
    }
    size_t held = usable_size(block);
    if (!atomic_load_explicit(&ready, memory_order_relaxed) && sanitizer_is_there()) {
        return __interceptor_realloc(block, size);
    }
    if (held == 0) {
        misuse_report(MISUSE_INVALID_FREE, block);
        return out_of_memory();
    }
    if (size > PTRDIFF_MAX || (size > held && is_too_large(size - held))) {
        return out_of_memory();
    }
    const struct span *span = heap_large_span(door_heap_of(block), block);
    if (span == NULL ? fits(held, size) || class_of(held) == class_of(size)
                     : class_of(size) == 0 && pages_for(span->offset + size) == span->pages) {
        return block;
    }
    if (span != NULL && class_of(size) == 0) {
        /* To the profile one block ends and another begins; the old place may be another thread's at once. */
        profiling_forget(block);
        void *resized = door_resize_large(block, pages_for(span->offset + size));
        if (resized != NULL) {
            if (profiling_is_on() && profiling_counts(size)) {
                profiling_note(resized, size);
            }
            return resized;
        }
    }
    void *other = allocate(size);
    if (other != NULL) {
        memcpy(other, block, held < size ? held : size);
        release(block);
    } else if (size <= held) {
        return block; /* shrinking cannot fail */
    }
    return other;
}
