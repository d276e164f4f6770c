#include "governor/thp_policy.h"

#include "os/clock.h"
#include "os/residency.h"

#define MAX_BLOCKS_PER_SAMPLE  512 /* while blocks are not touched */
#define SURE_BLOCKS_PER_SAMPLE 64  /* while all are */
#define BLOCKS_PER_SAMPLE      4
#define BLOCKS_PER_CONTROL     16
#define MAX_SCORE              16
#define HIGH_SCORE             8
/* A block that was not touched weighs as much as four that were: memory costs more than time. */
#define SCORE_SPARSE  4
#define MIN_COSTLY_NS 100000000ULL
#define MAX_COSTLY_NS 10000000000ULL

static bool is_control(const struct thp_policy *policy) {
    return policy->blocks % BLOCKS_PER_CONTROL == 0;
}

bool thp_policy_is_costly(const struct thp_policy *policy) {
    uint64_t until = atomic_load_explicit(&policy->costly_until_ns, memory_order_relaxed);
    return until != 0 && clock_coarse_ns() < until;
}

bool thp_policy_expects_touch(const struct thp_policy *policy) {
    return atomic_load_explicit(&policy->score, memory_order_relaxed) >= HIGH_SCORE && !is_control(policy);
}

bool thp_policy_allows(const struct thp_policy *policy) {
    return thp_policy_expects_touch(policy) && !thp_policy_is_costly(policy);
}

/* Two threads at once may both lengthen the pause, or end it: it is an estimate either way. */
void thp_policy_note_cost(struct thp_policy *policy, uint64_t ns, double small_ns) {
    uint64_t pause = 0;
    if ((double)ns > small_ns) {
        pause = atomic_load_explicit(&policy->costly_ns, memory_order_relaxed) * 2;
        pause = pause < MIN_COSTLY_NS ? MIN_COSTLY_NS : pause > MAX_COSTLY_NS ? MAX_COSTLY_NS : pause;
    }
    atomic_store_explicit(&policy->costly_ns, pause, memory_order_relaxed);
    atomic_store_explicit(&policy->costly_until_ns, pause == 0 ? 0 : clock_coarse_ns() + pause,
                          memory_order_relaxed);
}

struct iovec thp_policy_note(struct thp_policy *policy, const struct heap *heap, void *base) {
    /* The ring has only blocks that can be sampled, so that it reaches back equally far whatever their share
     * is. */
    uint64_t number = policy->blocks++;
    const struct span *span = heap_large_span_at(heap, base);
    if (span->huge || span->moved || span->prefaulted) {
        return (struct iovec){0};
    }
    void **place = &policy->recent[(number / (number % BLOCKS_PER_CONTROL == 0 ? BLOCKS_PER_CONTROL : 1)) %
                                   THP_RECENT_BLOCKS];
    const struct span *older = *place == NULL ? NULL : heap_large_span_at(heap, *place);
    *place = base;
    unsigned between = BLOCKS_PER_SAMPLE + atomic_load_explicit(&policy->interval, memory_order_relaxed);
    bool sample = number - policy->sampled_at >= between && older != NULL && !older->huge && !older->moved &&
                  !older->prefaulted;
    if (!sample) {
        return (struct iovec){0};
    }
    policy->sampled_at = number;
    return (struct iovec){older->base, (size_t)older->pages << heap->space.page_shift};
}

void thp_policy_sample(struct thp_policy *policy, const char *base, size_t bytes, size_t page_size) {
    /* The end of the block, since blocks are filled from the front; without the last page, which placement
     * may have added. */
    bytes -= bytes > page_size ? page_size : 0;
    size_t sampled = bytes < RESIDENCY_SAMPLE_BYTES ? bytes : RESIDENCY_SAMPLE_BYTES;
    bool touched = residency_is_full(base + bytes - sampled, sampled);
    int score = atomic_load_explicit(&policy->score, memory_order_relaxed);
    score = touched ? score + 1 : score - SCORE_SPARSE;
    score = score < 0 ? 0 : score > MAX_SCORE ? MAX_SCORE : score;
    /* Two threads at once may lose a point, which a later sample makes good. */
    atomic_store_explicit(&policy->score, score, memory_order_relaxed);
    unsigned interval = atomic_load_explicit(&policy->interval, memory_order_relaxed);
    /* The surer the answer, either way, the fewer the samples. */
    unsigned max = touched ? SURE_BLOCKS_PER_SAMPLE : MAX_BLOCKS_PER_SAMPLE;
    interval = touched && score < MAX_SCORE ? 0 : interval * 2 + 1;
    interval = interval < max ? interval : max;
    atomic_store_explicit(&policy->interval, interval, memory_order_relaxed);
}
