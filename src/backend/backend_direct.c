/* The direct backend: each thread works on the heap itself, under its locks. */
#include "backend/backend.h"

#include "base/assert.h"
#include "governor/blocks.h"
#include "governor/governor.h"
#include "governor/helper.h"
#include "governor/large.h"

static struct taken direct_take_blocks(struct backend *backend, uint32_t class, void **blocks, size_t count) {
    calm_assert(count > 0 && count <= MAX_MAGAZINE_BLOCKS, class, count);
    return (struct taken){governor_take_blocks(backend->governor, class, blocks, count, false), true};
}

static void direct_put_blocks(struct backend *backend, uint32_t class, void *const *blocks, size_t count) {
    governor_put_blocks(backend->governor, class, blocks, count);
}

static void *direct_take_large(struct backend *backend, size_t pages, size_t align_pages, bool zeroed,
                               bool *zero) {
    return governor_take_large(backend->governor, pages, align_pages, zeroed, false, zero);
}

static void direct_put_large(struct backend *backend, void *block) {
    governor_put_large(backend->governor, block);
}

static void *direct_resize_large(struct backend *backend, void *block, size_t pages) {
    struct span *span = heap_large_span(&backend->governor->heap, block);
    return span == NULL ? NULL : governor_resize_large(backend->governor, span, pages);
}

static struct heap *direct_heap_of(struct backend *backend, const void *block) {
    struct heap *heap = &backend->governor->heap;
    return space_page(&heap->space, block) != 0 ? heap : NULL;
}

static bool direct_run(struct backend *backend, heap_work *work, void *subject) {
    work(backend->governor, subject);
    return true;
}

static size_t direct_trim(struct backend *backend, size_t keep_bytes) {
    return governor_trim(backend->governor, keep_bytes);
}

static size_t direct_trim_by_helper(struct backend *backend, size_t keep_bytes) {
    return governor_trim_by_helper(backend->governor, keep_bytes);
}

static void direct_add_counters(const struct backend *backend, struct calm_stats *stats) {
    (void)backend, (void)stats;
}

static enum interrupted direct_interrupted(const struct backend *backend) {
    return governor_is_held(backend->governor) ? INTERRUPTED_HOLDER : INTERRUPTED_NOTHING;
}

static void direct_before_fork(struct backend *backend) {
    governor_shrink_for_fork(backend->governor);
    governor_before_fork(backend->governor);
}

static void direct_after_fork(struct backend *backend, bool child) {
    governor_after_fork(backend->governor, child);
}

static bool direct_stop_threads(struct backend *backend, uint64_t timeout_ns) {
    return helper_stop(backend->governor, timeout_ns);
}

static void direct_end(struct backend *backend) {
    governor_end(backend->governor);
}

static const struct backend_functions direct_functions = {
    .take_blocks = direct_take_blocks,
    .put_blocks = direct_put_blocks,
    .take_large = direct_take_large,
    .put_large = direct_put_large,
    .resize_large = direct_resize_large,
    .heap_of = direct_heap_of,
    .run = direct_run,
    .trim = direct_trim,
    .trim_by_helper = direct_trim_by_helper,
    .add_counters = direct_add_counters,
    .interrupted = direct_interrupted,
    .before_fork = direct_before_fork,
    .after_fork = direct_after_fork,
    .stop_threads = direct_stop_threads,
    .end = direct_end,
};

void backend_direct_open(struct backend *backend, struct governor *governor) {
    *backend = (struct backend){&direct_functions, governor, false};
}
