#include "arena/thp_policy.h"

#include "base/assert.h"
#include "base/size.h"
#include "os/clock.h"
#include "os/residency.h"

#define MAX_BLOCKS_PER_SAMPLE  512 /* the largest interval while blocks are not touched */
#define SURE_BLOCKS_PER_SAMPLE 64  /* the largest interval while all blocks are touched */
#define BLOCKS_PER_SAMPLE      4
#define BLOCKS_PER_CONTROL     32
#define FREED_PER_SAMPLE       8 /* one in this many freed blocks is sampled once all samples agree */
#define MAX_SCORE              16
#define HIGH_SCORE             8
/* An untouched block in use weighs as much as four touched ones, since memory
 * costs more than time. The sample of a freed block is final: a touched one
 * earns huge pages, and an untouched one resets the score to 0. */
#define SCORE_SPARSE  4
#define MIN_COSTLY_NS 100000000ULL
#define MAX_COSTLY_NS 10000000000ULL

static struct thp_class *thp_class_of(struct thp_policy *policy, size_t pages) {
    size_t exponent = 63 - (size_t)__builtin_clzll(pages);
    calm_assert(exponent > 0, pages);
    size_t number = exponent * 2 + (pages >> (exponent - 1) & 1);
    return &policy->classes[size_min(number, THP_CLASSES - 1)];
}

bool thp_policy_is_costly(const struct thp_policy *policy) {
    uint64_t until = atomic_load_explicit(&policy->costly_until_ns, memory_order_relaxed);
    return until != 0 && clock_coarse_ns() < until;
}

enum thp_evidence thp_policy_expect(struct thp_policy *policy, size_t pages) {
    struct thp_class *size_class = thp_class_of(policy, pages);
    uint8_t score = atomic_load_explicit(&size_class->score, memory_order_relaxed);
    bool is_control = ++size_class->handed_out % BLOCKS_PER_CONTROL == 0;
    return score == 0 ? THP_NONE : is_control ? THP_CONTROL : score < HIGH_SCORE ? THP_TOUCHED : THP_SURE;
}

/* Two threads may both lengthen the pause, or end it, concurrently. The pause
 * is an estimate in any case. */
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

/* Returns whether the residency of the block's pages shows which pages its
 * owner touched. */
static bool is_telling(const struct span *span) {
    return span->fresh && atomic_load_explicit(&span->marks, memory_order_relaxed) == 0;
}

/* The ring holds only blocks that can be sampled. It always holds the same
 * number of them, whatever their share of all blocks. */
struct iovec thp_policy_note(struct thp_policy *policy, const struct heap *heap, const struct span *span) {
    if (!is_telling(span)) {
        return (struct iovec){0};
    }
    uint64_t number = policy->blocks++;
    void **place = &policy->recent[number % THP_RECENT_BLOCKS];
    const struct span *older = *place == NULL ? NULL : heap_large_span_at(heap, *place);
    *place = span->base;
    unsigned between = BLOCKS_PER_SAMPLE + atomic_load_explicit(&policy->interval, memory_order_relaxed);
    if (number - policy->sampled_at < between || older == NULL || !is_telling(older) ||
        older->pages < THP_MIN_PAGES) {
        return (struct iovec){0};
    }
    policy->sampled_at = number;
    return (struct iovec){older->base, (size_t)older->pages << heap->space.page_shift};
}

bool thp_policy_samples_freed(struct thp_policy *policy, const struct span *span) {
    if (span->pages < THP_MIN_PAGES || !is_telling(span)) {
        return false;
    }
    struct thp_class *size_class = thp_class_of(policy, span->pages);
    uint8_t score = atomic_load_explicit(&size_class->score, memory_order_relaxed);
    /* Threads that count concurrently may lose a count. */
    uint8_t freed = __atomic_load_n(&size_class->freed, __ATOMIC_RELAXED);
    __atomic_store_n(&size_class->freed, (uint8_t)(freed + 1), __ATOMIC_RELAXED);
    return (score > 0 && score < MAX_SCORE) || freed % FREED_PER_SAMPLE == 0;
}

/* Samples the end of the block, since programs fill blocks from the front.
 * Leaves out the last page, which placement may have added. Samples the middle,
 * too, since a program may touch only the ends. */
size_t thp_policy_sampled(const char *base, size_t bytes, size_t page_size, struct iovec *ranges) {
    bytes -= bytes > page_size ? page_size : 0;
    size_t end = size_min(bytes, RESIDENCY_SAMPLE_BYTES);
    ranges[0] = (struct iovec){(void *)(base + bytes - end), end};
    ranges[1] = (struct iovec){(void *)(base + bytes / 2 / page_size * page_size), page_size};
    calm_assert(end > 0 && end <= RESIDENCY_SAMPLE_BYTES, end);
    return bytes / 2 > end ? 2 : 1;
}

static bool is_touched(const char *base, size_t bytes, size_t page_size) {
    struct iovec ranges[THP_SAMPLED_RANGES];
    size_t count = thp_policy_sampled(base, bytes, page_size, ranges);
    bool touched = true;
    for (size_t i = 0; i < count; i++) {
        touched = touched && residency_is_full(ranges[i].iov_base, ranges[i].iov_len);
    }
    return touched;
}

/* Adapts the interval. The more certain the answer is, touched or untouched,
 * the fewer blocks in use are sampled. */
static void set_interval(struct thp_policy *policy, bool touched, bool sure) {
    unsigned interval = atomic_load_explicit(&policy->interval, memory_order_relaxed);
    unsigned max = touched ? SURE_BLOCKS_PER_SAMPLE : MAX_BLOCKS_PER_SAMPLE;
    interval = touched && !sure ? 0 : interval * 2 + 1;
    atomic_store_explicit(&policy->interval, interval < max ? interval : max, memory_order_relaxed);
}

/* If two threads change the score concurrently, a point may be lost. A later
 * sample restores it. */
void thp_policy_sample(struct thp_policy *policy, const char *base, size_t bytes, size_t page_size,
                       bool freed) {
    struct thp_class *size_class = thp_class_of(policy, bytes / page_size);
    bool touched = is_touched(base, bytes, page_size);
    unsigned score = atomic_load_explicit(&size_class->score, memory_order_relaxed);
    if (touched) {
        score = (unsigned)size_min(score + (freed ? HIGH_SCORE : 1), MAX_SCORE);
    } else {
        score = freed || score < SCORE_SPARSE ? 0 : score - SCORE_SPARSE;
    }
    calm_assert(score <= MAX_SCORE, score);
    atomic_store_explicit(&size_class->score, (uint8_t)score, memory_order_relaxed);
    if (!freed) {
        set_interval(policy, touched, score == MAX_SCORE);
    }
}
