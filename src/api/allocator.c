#include "api/allocator.h"

#include "api/features.h"
#include "api/misuse.h"
#include "api/placing.h"
#include "api/requests.h"
#include "api/sanitizer.h"
#include "base/assert.h"
#include "base/size.h"
#include "os/vm.h"

#include <errno.h>
#include <string.h>

#define CACHE_LINE_BYTES 64
/* Apart from the fast path that calls it last, which then needs no stack frame. */
#define SLOW __attribute__((noinline))

void *out_of_memory(void) {
    errno = ENOMEM;
    return NULL;
}

/* As class_for, whether or not the fast path is switched off. */
static uint32_t allocator_class(const struct allocator *allocator, size_t size) {
    const struct size_classes *classes = &allocator->classes;
    return size <= classes->max_size ? size_class_of(classes, size) : 0;
}

static size_t pages_for(const struct allocator *allocator, size_t size) {
    uint32_t shift = allocator->governor->heap.space.page_shift;
    return (size + ((size_t)1 << shift) - 1) >> shift;
}

/* A size beyond the machine's memory is subject to the kernel's overcommit policy, which does not apply to
 * address space that is only reserved. */
static bool is_too_large(const struct allocator *allocator, size_t size) {
    return size > PTRDIFF_MAX || (size > allocator->memory_bytes && !vm_can_map(size));
}

/* ---- the backend, as the slow paths call it: each call also carries out requests of other processes ---- */

static struct backend *backend_of(struct allocator *allocator) {
    requests_notice(allocator->backend->functions->trim);
    return allocator->backend;
}

static struct taken allocator_take_blocks(struct allocator *allocator, uint32_t class, void **blocks,
                                          size_t count) {
    struct backend *backend = backend_of(allocator);
    return backend->functions->take_blocks(backend, class, blocks, count);
}

static void allocator_put_blocks(struct allocator *allocator, uint32_t class, void *const *blocks,
                                 size_t count) {
    struct backend *backend = backend_of(allocator);
    backend->functions->put_blocks(backend, class, blocks, count);
}

/* zero: whether it is known to be zero; NULL if the caller needs no zeros. */
static void *allocator_take_large(struct allocator *allocator, size_t pages, size_t align_pages, bool *zero) {
    struct backend *backend = backend_of(allocator);
    bool ignored;
    return backend->functions->take_large(backend, pages, align_pages, zero != NULL,
                                          zero != NULL ? zero : &ignored);
}

static void allocator_put_large(struct allocator *allocator, void *block) {
    struct backend *backend = backend_of(allocator);
    backend->functions->put_large(backend, block);
}

static struct heap *allocator_heap(struct allocator *allocator, const void *block) {
    return allocator->backend->functions->heap_of(allocator->backend, block);
}

/* Memory is short: blocks in caches may make room. */
static void trim_all(struct allocator *allocator) {
    allocator->backend->functions->trim(allocator->backend, SIZE_MAX);
}

/* ---- allocation ---- */

static void *take_pages(struct allocator *allocator, size_t size, size_t alignment, bool *zero) {
    if (is_too_large(allocator, size)) {
        return out_of_memory();
    }
    size_t page = page_bytes(allocator->governor);
    calm_assert((alignment & (alignment - 1)) == 0 && size > 0, alignment, size);
    size_t align_pages = alignment <= page ? 1 : alignment / page;
    size_t pages = pages_for(allocator, size);
    void *base =
        allocator_take_large(allocator, pages + placing_pages(allocator, size, alignment), align_pages, zero);
    if (base == NULL) {
        trim_all(allocator);
        base = allocator_take_large(allocator, pages, align_pages, zero);
    }
    return base == NULL ? out_of_memory()
                        : placing_place(allocator, allocator_heap(allocator, base), base, size, alignment);
}

static bool is_sampled(size_t size) {
    return heap_profile_is_on() && heap_profile_should_sample(size);
}

static void *allocate_large(struct allocator *allocator, size_t size, size_t alignment, bool sampled,
                            bool *zero) {
    void *block = take_pages(allocator, size == 0 ? 1 : size, alignment, zero);
    if (sampled && block != NULL) {
        heap_profile_add(block, size);
    }
    return block;
}

/* Puts blocks into the cache of whichever CPU this is, and those that it has no room for into the heap. */
static void cache_blocks(struct allocator *allocator, uint32_t class, void *const *blocks, size_t count) {
    calm_assert(class > 0 && class < allocator->classes.count && count <= MAX_MAGAZINE_BLOCKS, class, count);
    size_t pushed = count == 0 ? 0 : cpu_cache_push_some(allocator->caches, class, blocks, count);
    if (pushed < count) {
        allocator_put_blocks(allocator, class, blocks + pushed, count - pushed);
    }
}

/* A block of a class whose cache is empty: takes a magazine, of which one block is the caller's. */
static void *refill(struct allocator *allocator, uint32_t class) {
    cpu_cache_open(allocator->caches, class);
    void *blocks[MAX_MAGAZINE_BLOCKS];
    if (cpu_cache_pop_some(allocator->caches, class, blocks, 1) == 1) {
        fill_new(blocks[0], class);
        return blocks[0];
    }
    cpu_cache_ran_empty(allocator->caches, class);
    struct taken taken =
        allocator_take_blocks(allocator, class, blocks, cpu_cache_magazine(allocator->caches, class));
    if (taken.count == 0) {
        trim_all(allocator);
        taken = allocator_take_blocks(allocator, class, blocks, 1);
        if (taken.count == 0) {
            return out_of_memory();
        }
    }
    calm_assert(taken.count <= MAX_MAGAZINE_BLOCKS && (uintptr_t)blocks[0] % SIZE_QUANTUM == 0, class,
                taken.count);
    void *block = blocks[--taken.count];
    cache_blocks(allocator, class, blocks, taken.count);
    fill_new(block, class);
    return block;
}

/* A block of a class while the heap is profiled: if it is sampled, of pages of its own, and aligned as any
 * block of its class may be. */
static void *allocate_counted(struct allocator *allocator, size_t size, uint32_t class) {
    if (heap_profile_should_sample(size)) {
        return allocate_large(allocator, size, vm_page_size(), true, NULL);
    }
    void *block;
    return cpu_cache_pop_some(allocator->caches, class, &block, 1) == 1 ? block : refill(allocator, class);
}

void *allocator_allocate(struct allocator *allocator, size_t size) {
    uint32_t class = allocator_class(allocator, size);
    if (class == 0) {
        return allocate_large(allocator, size, SIZE_QUANTUM, is_sampled(size), NULL);
    }
    return heap_profile_is_on() ? allocate_counted(allocator, size, class) : refill(allocator, class);
}

/* Apart, so that the compiler leaves allocate_slow in one piece: profiles drop its frame by its name. */
__attribute__((noinline)) static void *allocate_elsewhere(size_t size) {
    return sanitizer_is_there() ? __interceptor_malloc(size) : out_of_memory();
}

void *allocate_slow(size_t size) {
    return allocator_ready() ? allocator_allocate(&calm_allocator, size) : allocate_elsewhere(size);
}

/* ---- release ---- */

/* Reports what the caller frees. */
static void misuse_now(const struct allocator *allocator, enum misuse kind, const void *block) {
    allocator->governor->misused(&(struct misuse_record){kind, false, block});
}

/*
 * A block of a class whose cache is full: a magazine leaves the cache. Into a cache that was only just opened
 * a small block goes below a magazine of others: a thread that frees a block of another thread does not get
 * it back at once, to write to a cache line that it shares with the block's neighbours (passive false
 * sharing: Berger et al., "Hoard").
 */
static void spill(struct allocator *allocator, uint32_t class, void *block) {
    const struct size_class *of = &allocator->classes.of[class];
    void *blocks[MAX_MAGAZINE_BLOCKS];
    if (cpu_cache_is_newest(allocator->caches, class, block)) {
        misuse_now(allocator, MISUSE_DOUBLE_FREE, block);
        return;
    }
    if (cpu_cache_open(allocator->caches, class) && of->size < CACHE_LINE_BYTES) {
        cache_blocks(allocator, class, &block, 1);
        struct taken taken = allocator_take_blocks(allocator, class, blocks, of->batch);
        if (taken.cacheable) {
            cache_blocks(allocator, class, blocks, taken.count);
        } else if (taken.count > 0) {
            allocator_put_blocks(allocator, class, blocks, taken.count);
        }
        return;
    }
    if (cpu_cache_push_some(allocator->caches, class, &block, 1) == 1 ||
        (cpu_cache_ran_full(allocator->caches, class) &&
         cpu_cache_push_some(allocator->caches, class, &block, 1) == 1)) {
        return;
    }
    size_t count =
        cpu_cache_pop_some(allocator->caches, class, blocks, cpu_cache_magazine(allocator->caches, class));
    calm_assert(count < MAX_MAGAZINE_BLOCKS, class, count);
    blocks[count++] = block;
    allocator_put_blocks(allocator, class, blocks, count);
}

void allocator_release(struct allocator *allocator, void *block) {
    struct heap *heap = allocator_heap(allocator, block);
    int class = heap == NULL ? -1 : heap_class_at(heap, block);
    if (class < 0 || (class > 0 && (uintptr_t)block % SIZE_QUANTUM != 0)) {
        misuse_now(allocator, MISUSE_INVALID_FREE, block);
    } else if (class == 0) {
        heap_profile_remove(block); /* before another thread may have it */
        allocator_put_large(allocator, block);
    } else if (heap == &allocator->governor->heap) {
        spill(allocator, (uint32_t) class, block);
    } else {
        allocator_put_blocks(allocator, (uint32_t) class, &block, 1);
    }
}

void release_slow(void *block) {
    if (block == NULL) {
        return;
    }
    if (allocator_ready()) {
        allocator_release(&calm_allocator, block);
    } else if (sanitizer_is_there()) {
        __interceptor_free(block);
    } else {
        misuse_report_now(MISUSE_INVALID_FREE, block);
    }
}

/* ---- other entry points of the process's allocator ---- */

/* Blocks of a class lie at multiples of its size from the start of a page. */
static uint32_t aligned_class(size_t alignment, size_t size) {
    const struct size_classes *classes = &calm_allocator.classes;
    uint32_t class = allocator_class(&calm_allocator, size_max(size, alignment));
    while (class != 0 && class < classes->count && classes->of[class].size % alignment != 0) {
        ++class;
    }
    return class < classes->count ? class : 0;
}

static SLOW void *allocate_aligned_slow(size_t alignment, size_t size) {
    if (alignment <= SIZE_QUANTUM) {
        return allocate_slow(size);
    }
    if (sanitizer_is_there()) {
        return __interceptor_memalign(alignment, size);
    }
    if (!allocator_ready() || size > PTRDIFF_MAX || alignment > PTRDIFF_MAX) {
        return out_of_memory();
    }
    size_t page = page_bytes(&calm_governor);
    uint32_t class = alignment <= page ? aligned_class(alignment, size) : 0;
    if (class != 0) {
        return allocate(calm_allocator.classes.of[class].size);
    }
    return allocate_large(&calm_allocator, size, alignment, is_sampled(size), NULL);
}

void *allocate_aligned(size_t alignment, size_t size) {
    void *block;
    bool found = pop_cached(&calm_caches, aligned_class_for(alignment, size), &block);
    return __builtin_expect(found, 1) ? block : allocate_aligned_slow(alignment, size);
}

/* Zeros the quanta that hold a block's bytes: of those of up to 256 bytes by stores that overlap, without a
 * call or a loop. Returns the block. */
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

/* Without a block in the cache, or with a size that has no class. */
static SLOW void *allocate_zeroed_slow(size_t size) {
    if (!allocator_ready()) {
        return sanitizer_is_there() ? __interceptor_calloc(1, size) : out_of_memory();
    }
    bool zero = false;
    void *block = allocator_class(&calm_allocator, size) != 0
                      ? allocate_slow(size)
                      : allocate_large(&calm_allocator, size, SIZE_QUANTUM, is_sampled(size), &zero);
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

size_t usable_size(const void *block) {
    if (sanitizer_is_there()) {
        return __interceptor_malloc_usable_size((void *)(uintptr_t)block);
    }
    const struct heap *heap =
        block == NULL || !allocator_ready() ? NULL : allocator_heap(&calm_allocator, block);
    int class = heap == NULL ? -1 : heap_class_at(heap, block);
    if (class != 0) {
        return class < 0 ? 0 : calm_allocator.classes.of[class].size;
    }
    const struct span *span = heap_large_span(heap, block);
    return span == NULL ? 0 : ((size_t)span->pages << heap->space.page_shift) - span->offset;
}

/* Whether a block may stay: no smaller than asked, and less than twice as large. */
static bool fits(size_t held, size_t size) {
    return size <= held && size > held / 2;
}

/* NULL if the block cannot be resized where it is, or by moving its pages. */
static void *allocator_resize_large(void *block, size_t size, size_t pages) {
    /* To the profile one block ends and another begins; the old address may soon be another thread's. */
    heap_profile_remove(block);
    struct backend *backend = calm_allocator.backend;
    void *resized = backend->functions->resize_large(backend, block, pages);
    if (resized != NULL && is_sampled(size)) {
        heap_profile_add(resized, size);
    }
    return resized;
}

/* In a block of its own; the old one stays if memory is short. */
static void *reallocate_elsewhere(void *block, size_t held, size_t size) {
    void *other = allocate(size);
    if (other != NULL) {
        calm_assert(usable_size(other) >= size && other != block, other, size);
        memcpy(other, block, size_min(held, size));
        release(block);
    } else if (size <= held) {
        return block; /* shrinking cannot fail */
    }
    return other;
}

/* What has no class: NULL, large blocks and invalid ones, and sizes of 0 or too large; and other segments. */
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
    if (size > PTRDIFF_MAX || (size > held && is_too_large(&calm_allocator, size - held))) {
        return out_of_memory();
    }
    const struct span *span = heap_large_span(allocator_heap(&calm_allocator, block), block);
    uint32_t class = allocator_class(&calm_allocator, size);
    if (span == NULL && (fits(held, size) || class == allocator_class(&calm_allocator, held))) {
        return block;
    }
    if (span != NULL && class == 0) {
        size_t pages = pages_for(&calm_allocator, span->offset + size);
        void *resized = pages == span->pages ? block : allocator_resize_large(block, size, pages);
        if (resized != NULL) {
            return resized;
        }
    }
    return reallocate_elsewhere(block, held, size);
}

static SLOW void *reallocate_small(void *block, uint32_t class, size_t size) {
    size_t held = calm_allocator.classes.of[class].size;
    void *other;
    if (!pop_cached(&calm_caches, class_for(size), &other)) {
        return reallocate_elsewhere(block, held, size);
    }
    memcpy(other, block, size_min(held, size));
    if (!push_cached(&calm_caches, class, block)) {
        release_slow(block);
    }
    return other;
}

void *reallocate(void *block, size_t size) {
    uint32_t class;
    bool small = find_class(block, &class) && class != 0 && size - 1 < PTRDIFF_MAX;
    if (__builtin_expect(!small, 0)) {
        return reallocate_slow(block, size);
    }
    const struct size_classes *classes = &calm_allocator.classes;
    size_t held = classes->of[class].size;
    bool stays = size <= held && (fits(held, size) || size_class_of(classes, size) == class);
    return stays ? block : reallocate_small(block, class, size);
}

size_t allocator_trim(size_t keep_bytes) {
    return allocator_ready() ? calm_allocator.backend->functions->trim(calm_allocator.backend, keep_bytes)
                             : 0;
}
