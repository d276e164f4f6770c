#include "governor/density.h"

#include "os/clock.h"
#include "os/residency.h"

#define BLOCKS_PER_LOOK_MOST 512 /* while blocks are not touched */
#define BLOCKS_PER_LOOK_SURE 64  /* while all are */
#define BLOCKS_PER_LOOK      4
#define BLOCKS_PER_CONTROL   16
#define SCORE_MOST           16
#define SCORE_HIGH           8
/* A block that was not touched weighs as much as four that were: memory is dearer than time. */
#define SCORE_SPARSE  4
#define DEAR_NS_LEAST 100000000ULL
#define DEAR_NS_MOST  10000000000ULL

static bool is_control(const struct density *density) {
    return density->blocks % BLOCKS_PER_CONTROL == 0;
}

bool density_is_dear(const struct density *density) {
    uint64_t until = atomic_load_explicit(&density->dear_until_ns, memory_order_relaxed);
    return until != 0 && clock_coarse_ns() < until;
}

bool density_expects_touch(const struct density *density) {
    return atomic_load_explicit(&density->score, memory_order_relaxed) >= SCORE_HIGH && !is_control(density);
}

bool density_is_high(const struct density *density) {
    return density_expects_touch(density) && !density_is_dear(density);
}

/* Threads that come at once may both lengthen the pause, or end it: it is a guess either way. */
void density_note_cost(struct density *density, uint64_t ns, double small_ns) {
    uint64_t pause = 0;
    if ((double)ns > small_ns) {
        pause = atomic_load_explicit(&density->dear_ns, memory_order_relaxed) * 2;
        pause = pause < DEAR_NS_LEAST ? DEAR_NS_LEAST : pause > DEAR_NS_MOST ? DEAR_NS_MOST : pause;
    }
    atomic_store_explicit(&density->dear_ns, pause, memory_order_relaxed);
    atomic_store_explicit(&density->dear_until_ns, pause == 0 ? 0 : clock_coarse_ns() + pause,
                          memory_order_relaxed);
}

const struct span *density_note(struct density *density, const struct heap *heap, void *base) {
    /* In the ring only what may be judged, so that it reaches back as far whatever share of blocks that is.
     */
    uint64_t number = density->blocks++;
    const struct span *span = heap_large_span_at(heap, base);
    if (span->huge || span->moved || span->ready) {
        return NULL;
    }
    void **place = &density->recent[(number / (number % BLOCKS_PER_CONTROL == 0 ? BLOCKS_PER_CONTROL : 1)) %
                                    DENSITY_RECENT];
    const struct span *older = *place == NULL ? NULL : heap_large_span_at(heap, *place);
    *place = base;
    unsigned between = BLOCKS_PER_LOOK + atomic_load_explicit(&density->patience, memory_order_relaxed);
    bool look = number - density->looked >= between && older != NULL && !older->huge && !older->moved &&
                !older->ready;
    if (!look) {
        return NULL;
    }
    density->looked = number;
    return older;
}

void density_judge(struct density *density, const char *base, size_t bytes, size_t page_size) {
    /* The end: what is filled from the front is there last. But not the last page, of which a block may need
     * nothing but that it could have begun later. */
    bytes -= bytes > page_size ? page_size : 0;
    size_t looked = bytes < RESIDENCY_SAMPLE_BYTES ? bytes : RESIDENCY_SAMPLE_BYTES;
    bool touched = residency_is_full(base + bytes - looked, looked, page_size);
    int score = atomic_load_explicit(&density->score, memory_order_relaxed);
    score = touched ? score + 1 : score - SCORE_SPARSE;
    score = score < 0 ? 0 : score > SCORE_MOST ? SCORE_MOST : score;
    /* Judges that come together may lose a point: it will be made again. */
    atomic_store_explicit(&density->score, score, memory_order_relaxed);
    unsigned patience = atomic_load_explicit(&density->patience, memory_order_relaxed);
    /* What is certain, either way, is asked ever more seldom. */
    unsigned most = touched ? BLOCKS_PER_LOOK_SURE : BLOCKS_PER_LOOK_MOST;
    patience = touched && score < SCORE_MOST ? 0 : patience * 2 + 1;
    patience = patience < most ? patience : most;
    atomic_store_explicit(&density->patience, patience, memory_order_relaxed);
}
