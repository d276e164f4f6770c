#include "api/allocator.h"

#include "api/features.h"
#include "api/misuse.h"
#include "api/placing.h"
#include "api/requests.h"
#include "api/sanitizer.h"
#include "arena/arena.h"
#include "arena/blocks.h"
#include "arena/large.h"
#include "arena/select.h"
#include "base/assert.h"
#include "base/size.h"
#include "os/vm.h"

#include <errno.h>
#include <string.h>

/* For a slow path that a fast path calls last. It is not inlined, so the fast
 * path needs no stack frame. */
#define SLOW __attribute__((noinline))

void *out_of_memory(void) {
    errno = ENOMEM;
    return NULL;
}

/* Returns the class of a size, or 0. Unlike class_for, also works while the
 * fast path is switched off. */
static uint32_t allocator_class(size_t size) {
    const struct size_classes *classes = &calm_all_classes;
    return size <= classes->max_size ? size_class_of(classes, size) : 0;
}

static size_t pages_for(size_t size) {
    uint32_t shift = page_shift(&calm_arenas);
    return (size + ((size_t)1 << shift) - 1) >> shift;
}

/* Returns whether a size must be refused. The kernel does not apply its policy
 * of overcommitment to address space that is only reserved. This function
 * applies the policy to sizes beyond the machine's memory. */
static bool is_too_large(size_t size) {
    return size > PTRDIFF_MAX || (size > calm_memory_bytes && !vm_can_map(size));
}

/* Called if memory is short. Flushes the caches and depots into the heap, which
 * may then find room. Purges nothing. */
static void trim_all(void) {
    arena_trim(&calm_arenas, SIZE_MAX);
}

/* ---- allocation ---- */

/* If the caller needs no zeros, `zero` is NULL. Otherwise *zero tells whether
 * the memory is known to be zero. */
static void *take_pages(size_t size, size_t alignment, bool *zero) {
    if (is_too_large(size)) {
        return out_of_memory();
    }
    size_t page = page_bytes(&calm_arenas);
    calm_assert((alignment & (alignment - 1)) == 0 && size > 0, alignment, size);
    size_t align_pages = alignment <= page ? 1 : alignment / page;
    size_t pages = pages_for(size);
    size_t placed_pages = pages + placing_pages(size, alignment);
    bool wants_zeros = zero != NULL;
    bool ignored;
    zero = wants_zeros ? zero : &ignored;
    requests_notice();
    void *base = arena_take_large(&calm_arenas, placed_pages, align_pages, wants_zeros, zero);
    if (base == NULL) {
        trim_all();
        base = arena_take_large(&calm_arenas, pages, align_pages, wants_zeros, zero);
    }
    return base == NULL ? out_of_memory() : placing_place(base, size, alignment);
}

static bool is_sampled(size_t size) {
    return heap_profile_is_on() && heap_profile_should_sample(size);
}

static void *allocate_large(size_t size, size_t alignment, bool sampled, bool *zero) {
    void *block = take_pages(size == 0 ? 1 : size, alignment, zero);
    if (sampled && block != NULL) {
        heap_profile_add(block, size);
    }
    return block;
}

/* Pushes blocks onto the cache of the CPU that runs the caller. Passes the
 * blocks that do not fit to the arena. */
static void cache_blocks(uint32_t size_class, void *const *blocks, size_t count) {
    calm_assert(size_class > 0 && size_class < calm_all_classes.count && count <= MAX_MAGAZINE_BLOCKS,
                size_class, count);
    size_t pushed = count == 0 ? 0 : cpu_cache_push_some(&calm_caches, size_class, blocks, count);
    if (pushed < count) {
        arena_put_blocks(&calm_arenas, size_class, blocks + pushed, count - pushed);
    }
}

/* Called if the cache of the class has no block. Takes a magazine if that is
 * still so, and returns one block. A program that needs a second magazine
 * of a class is no longer a small one. */
static void *refill(uint32_t size_class) {
    requests_notice();
    bool first = cpu_cache_open(&calm_caches, size_class);
    void *blocks[MAX_MAGAZINE_BLOCKS];
    size_t wanted = cpu_cache_refill(&calm_caches, size_class, blocks);
    if (wanted == 0) {
        fill_new(blocks[0], size_class);
        return blocks[0];
    }
    if (!first) {
        allocator_refine_classes();
    }
    size_t taken = arena_take_blocks(&calm_arenas, size_class, blocks, wanted);
    if (taken == 0) {
        trim_all();
        taken = arena_take_blocks(&calm_arenas, size_class, blocks, 1);
        if (taken == 0) {
            return out_of_memory();
        }
    }
    calm_assert(taken <= MAX_MAGAZINE_BLOCKS && (uintptr_t)blocks[0] % SIZE_QUANTUM == 0, size_class, taken);
    void *block = blocks[--taken];
    cache_blocks(size_class, blocks, taken);
    fill_new(block, size_class);
    return block;
}

/* Returns a block of a class while the heap is profiled. A sampled block gets
 * pages of its own. It starts at a page, because the caller may be
 * allocate_aligned, which relies on the alignment of the class's blocks. */
static void *allocate_counted(size_t size, uint32_t size_class) {
    if (heap_profile_should_sample(size)) {
        return allocate_large(size, vm_page_size(), true, NULL);
    }
    void *block;
    return cpu_cache_pop_some(&calm_caches, size_class, &block, 1) == 1 ? block : refill(size_class);
}

/* A function of its own, so that the compiler does not split allocate_slow,
 * whose frame profiles drop by its name. */
__attribute__((noinline)) static void *allocate_elsewhere(size_t size) {
    return sanitizer_is_there() ? __interceptor_malloc(size) : out_of_memory();
}

/* With locks, the fast paths serve only a program with one thread. In others,
 * the slow paths begin here. */
static bool pop_locked(size_t size, void **block) {
    uint32_t size_class = class_for(size);
    return size_class != 0 && fill_if(locked_pop(&calm_caches, size_class, block), block, size_class);
}

static bool push_locked(void *block) {
    uint32_t size_class;
    return find_class(block, &size_class) && size_class != 0 && locked_push(&calm_caches, size_class, block);
}

/* Nor inlined: pprof then finds no name for it in a static program. */
__attribute__((noinline)) void *allocate_slow(size_t size) {
    void *block;
    if (pop_locked(size, &block)) {
        return block;
    }
    if (!allocator_ensure_started()) {
        return allocate_elsewhere(size);
    }
    uint32_t size_class = allocator_class(size);
    if (size_class == 0) {
        return allocate_large(size, SIZE_QUANTUM, is_sampled(size), NULL);
    }
    return heap_profile_is_on() ? allocate_counted(size, size_class) : refill(size_class);
}

/* ---- release ---- */

/* Called if the cache of the class is full, so that a magazine leaves the
 * cache. If the cache was only just opened, a small block goes below a magazine
 * of others. A thread that frees a block of another thread then does not get it
 * back immediately, and does not write to a cache line that it shares with the
 * block's neighbours (passive false sharing: Berger et al., "Hoard"). */
static void spill(uint32_t size_class, void *block) {
    void *blocks[MAX_MAGAZINE_BLOCKS];
    size_t count;
    switch (cpu_cache_spill(&calm_caches, size_class, block, blocks, &count)) {
    case CACHE_KEEPS:
        break;
    case CACHE_SPILLS:
        arena_put_blocks(&calm_arenas, size_class, blocks, count);
        break;
    case CACHE_OPENED:
        cache_blocks(size_class, &block, 1);
        count = calm_all_classes.of[size_class].batch;
        count = arena_take_blocks(&calm_arenas, size_class, blocks, count);
        cache_blocks(size_class, blocks, count);
        break;
    case CACHE_HAD:
        misuse_report_now(MISUSE_DOUBLE_FREE, block);
    }
}

/* heap_class_at, also before the allocator has started. */
static int class_at(const void *block) {
    return allocator_ensure_started() ? heap_class_at(heap_of(&calm_arenas, block), block) : -1;
}

static void allocator_release(void *block) {
    requests_notice();
    int size_class = class_at(block);
    if (size_class < 0 || (size_class > 0 && (uintptr_t)block % SIZE_QUANTUM != 0)) {
        misuse_report_now(MISUSE_INVALID_FREE, block);
    } else if (size_class == 0) {
        heap_profile_remove(block); /* before another thread may have it */
        arena_put_large(&calm_arenas, block);
    } else {
        spill((uint32_t)size_class, block);
    }
}

void release_slow(void *block) {
    if (block == NULL || push_locked(block)) {
        return;
    }
    if (allocator_ensure_started()) {
        allocator_release(block);
    } else if (sanitizer_is_there()) {
        __interceptor_free(block);
    } else {
        misuse_report_now(MISUSE_INVALID_FREE, block);
    }
}

/* ---- other entry points of the process's allocator ---- */

/* Returns the smallest class whose blocks have the size and the alignment, or
 * 0. Blocks of a class lie at multiples of its size from the start of a
 * page. */
static uint32_t aligned_class(size_t alignment, size_t size) {
    const struct size_classes *classes = &calm_all_classes;
    uint32_t size_class = allocator_class(size_max(size, alignment));
    while (size_class != 0 && size_class < classes->count && classes->of[size_class].size % alignment != 0) {
        ++size_class;
    }
    return size_class < classes->count ? size_class : 0;
}

static SLOW void *allocate_aligned_slow(size_t alignment, size_t size) {
    if (alignment <= SIZE_QUANTUM) {
        return allocate_slow(size);
    }
    if (sanitizer_is_there()) {
        return __interceptor_memalign(alignment, size);
    }
    if (!allocator_ensure_started() || size > PTRDIFF_MAX || alignment > PTRDIFF_MAX) {
        return out_of_memory();
    }
    size_t page = page_bytes(&calm_arenas);
    uint32_t size_class = alignment <= page ? aligned_class(alignment, size) : 0;
    if (size_class != 0) {
        return allocate(calm_all_classes.of[size_class].size);
    }
    return allocate_large(size, alignment, is_sampled(size), NULL);
}

void *allocate_aligned(size_t alignment, size_t size) {
    void *block;
    bool found = pop_cached(&calm_caches, aligned_class_for(alignment, size), &block);
    return __builtin_expect(found, 1) ? block : allocate_aligned_slow(alignment, size);
}

/* Zeros the quanta that contain the first `bytes` of a block, and returns the
 * block. Up to 256 bytes take stores that overlap, without a call or a loop. */
static inline void *clear_block(void *block, size_t bytes) {
    typedef uint64_t quantum __attribute__((vector_size(SIZE_QUANTUM), may_alias));
    const quantum zero = {0};
    if (bytes > 256) {
        return memset(block, 0, bytes);
    }
    size_t count = bytes == 0 ? 1 : (bytes + SIZE_QUANTUM - 1) / SIZE_QUANTUM;
    quantum *first = block;
    quantum *last = first + count - 1;
    *first = *last = zero;
    if (count > 2) {
        first[1] = last[-1] = zero;
    }
    if (count > 4) {
        first[2] = first[3] = last[-2] = last[-3] = zero;
    }
    if (count > 8) {
        first[4] = first[5] = first[6] = first[7] = zero;
        last[-4] = last[-5] = last[-6] = last[-7] = zero;
    }
    return block;
}

/* Called if the cache has no block, or if the size has no class. */
static SLOW void *allocate_zeroed_slow(size_t size) {
    if (!allocator_ensure_started()) {
        return sanitizer_is_there() ? __interceptor_calloc(1, size) : out_of_memory();
    }
    bool zero = false;
    void *block = allocator_class(size) != 0 ? allocate_slow(size)
                                             : allocate_large(size, SIZE_QUANTUM, is_sampled(size), &zero);
    return block == NULL || zero ? block : memset(block, 0, size);
}

void *allocate_zeroed(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        return sanitizer_is_there() ? __interceptor_calloc(count, size) : out_of_memory();
    }
    void *block;
    bool found = pop_cached(&calm_caches, class_for(bytes), &block);
    return __builtin_expect(found, 1) ? clear_block(block, bytes) : allocate_zeroed_slow(bytes);
}

static SLOW size_t usable_size_slow(const void *block) {
    if (sanitizer_is_there()) {
        return __interceptor_malloc_usable_size((void *)(uintptr_t)block);
    }
    int size_class = block == NULL ? -1 : class_at(block);
    if (size_class != 0) {
        return size_class < 0 ? 0 : calm_all_classes.of[size_class].size;
    }
    const struct span *span = heap_large_span(heap_of(&calm_arenas, block), block);
    return span == NULL ? 0 : (size_t)span->pages * page_bytes(&calm_arenas) - span->offset;
}

/* Some programs, such as redis, ask for each block that they allocate or
 * free. */
size_t usable_size(const void *block) {
    uint32_t size_class;
    bool small = find_class(block, &size_class) && size_class != 0;
    return __builtin_expect(small, 1) ? calm_all_classes.of[size_class].size : usable_size_slow(block);
}

/* Returns whether a block may stay where it is: it is large enough, and less
 * than twice as large as requested. */
static bool fits(size_t held, size_t size) {
    return size <= held && size > held / 2;
}

/* Returns NULL if the block cannot be resized in place or by moving its
 * pages. */
static void *allocator_resize_large(void *block, size_t size, size_t pages) {
    /* For the profile, one block ends and another begins. The old block ends
     * first, because another thread may soon get its address. */
    heap_profile_remove(block);
    void *resized = arena_resize_large(&calm_arenas, block, pages);
    if (resized != NULL && is_sampled(size)) {
        heap_profile_add(resized, size);
    }
    return resized;
}

/* Copies the block into a new one, and frees it. If memory is short, the old
 * block stays. */
static void *reallocate_elsewhere(void *block, size_t held, size_t size) {
    void *other = allocate(size);
    if (other != NULL) {
        calm_assert(usable_size(other) >= size && other != block, other, size);
        memcpy(other, block, size_min(held, size));
        release(block);
    } else if (size <= held) {
        return block; /* shrinking does not fail */
    }
    return other;
}

/* The slow path of reallocate: for NULL, large and invalid blocks, blocks
 * outside the first segment, a size of 0, and sizes that are too large. */
static SLOW void *reallocate_slow(void *block, size_t size) {
    if (block == NULL) {
        return allocate(size);
    }
    if (size == 0) {
        release(block);
        return NULL;
    }
    size_t held = usable_size(block);
    if (sanitizer_is_there()) {
        return __interceptor_realloc(block, size);
    }
    if (held == 0) {
        misuse_report_now(MISUSE_INVALID_FREE, block);
        return out_of_memory();
    }
    if (size > PTRDIFF_MAX || (size > held && is_too_large(size - held))) {
        return out_of_memory();
    }
    const struct span *span = heap_large_span(heap_of(&calm_arenas, block), block);
    uint32_t size_class = allocator_class(size);
    if (span == NULL && (fits(held, size) || size_class == allocator_class(held))) {
        return block;
    }
    if (span != NULL && size_class == 0) {
        size_t pages = pages_for(span->offset + size);
        void *resized = pages == span->pages ? block : allocator_resize_large(block, size, pages);
        if (resized != NULL) {
            return resized;
        }
    }
    return reallocate_elsewhere(block, held, size);
}

static SLOW void *reallocate_small(void *block, uint32_t size_class, size_t size) {
    size_t held = calm_all_classes.of[size_class].size;
    void *other;
    if (!pop_cached(&calm_caches, class_for(size), &other)) {
        return reallocate_elsewhere(block, held, size);
    }
    memcpy(other, block, size_min(held, size));
    if (!push_cached(&calm_caches, size_class, block)) {
        release_slow(block);
    }
    return other;
}

void *reallocate(void *block, size_t size) {
    uint32_t size_class;
    bool small = find_class(block, &size_class) && size_class != 0 && size - 1 < PTRDIFF_MAX;
    if (__builtin_expect(!small, 0)) {
        return reallocate_slow(block, size);
    }
    const struct size_classes *classes = &calm_all_classes;
    size_t held = classes->of[size_class].size;
    bool stays = size <= held && (fits(held, size) || size_class_of(classes, size) == size_class);
    return stays ? block : reallocate_small(block, size_class, size);
}

size_t allocator_trim(size_t keep_bytes) {
    return allocator_ensure_started() ? arena_trim(&calm_arenas, keep_bytes) : 0;
}
