#include "profile/samples.h"

#include "base/assert.h"
#include "os/clock.h"
#include "os/random.h"
#include "os/thread.h"

#include <string.h>

#define MAX_ADDRESSES ((size_t)1 << 21) /* 32 for each stack on average */
#define STACK_HEADS   MAX_SAMPLE_STACKS
#define BLOCK_HEADS   MAX_SAMPLE_BLOCKS

/* Blocks signals and acquires the lock. Returns the signals that were blocked
 * before. */
static uint64_t samples_enter(struct samples *samples) {
    uint64_t before = thread_block_signals();
    lock_acquire(&samples->lock);
    return before;
}

static void samples_leave(struct samples *samples, uint64_t before) {
    lock_release(&samples->lock);
    thread_set_signals(before);
}

/* The range is reserved as a whole, and committed as far as it is used. The
 * size of each array is a multiple of every page size. */
struct sample_tables {
    struct sample_stack stacks[MAX_SAMPLE_STACKS];
    uintptr_t addresses[MAX_ADDRESSES];
    struct sample_block blocks[MAX_SAMPLE_BLOCKS];
    struct heads {
        uint32_t of_stacks[STACK_HEADS];
        uint32_t of_blocks[BLOCK_HEADS];
    } heads;
};

#define RANGE_OF(array) ((struct address_range){.base = (void *)(array), .reserved = sizeof(array)})

bool samples_init(struct samples *samples) {
    struct sample_tables *tables = vm_reserve(sizeof *tables);
    if (tables == NULL) {
        return false;
    }
    if (!vm_commit(&tables->heads, sizeof tables->heads)) {
        vm_release(tables, sizeof *tables);
        return false;
    }
    samples->tables = tables;
    samples->stacks = RANGE_OF(tables->stacks);
    samples->addresses = RANGE_OF(tables->addresses);
    samples->blocks = RANGE_OF(tables->blocks);
    atomic_store_explicit(&samples->stacks_end, 1, memory_order_relaxed);
    samples->blocks_end = 1;
    return true;
}

/* Returns the number of the stack, and adds the stack if it is new. Returns 0
 * if there is no room. */
static uint32_t find_stack(struct samples *samples, const uintptr_t *addresses, size_t depth) {
    calm_assert(lock_is_mine(&samples->lock) && depth <= MAX_ADDRESSES, depth);
    uint64_t hash = depth;
    for (size_t i = 0; i < depth; i++) {
        hash = random_mix(hash + addresses[i] + RANDOM_GOLDEN_RATIO);
    }
    uint32_t *head = &samples->tables->heads.of_stacks[hash % STACK_HEADS];
    for (uint32_t number = *head; number != 0; number = samples->tables->stacks[number].next) {
        const struct sample_stack *stack = &samples->tables->stacks[number];
        if (stack->hash == hash && stack->depth == depth &&
            memcmp(&samples->tables->addresses[stack->first], addresses, depth * sizeof *addresses) == 0) {
            return number;
        }
    }
    uint32_t number = atomic_load_explicit(&samples->stacks_end, memory_order_relaxed);
    size_t addresses_end = samples->addresses_end + depth;
    if (number == MAX_SAMPLE_STACKS || addresses_end > MAX_ADDRESSES ||
        !address_range_reach(&samples->stacks, (number + 1) * sizeof *samples->tables->stacks) ||
        !address_range_reach(&samples->addresses, addresses_end * sizeof *addresses)) {
        return 0;
    }
    memcpy(&samples->tables->addresses[samples->addresses_end], addresses, depth * sizeof *addresses);
    struct sample_stack *stack = &samples->tables->stacks[number];
    stack->hash = hash;
    stack->first = samples->addresses_end;
    stack->depth = (uint32_t)depth;
    stack->next = *head;
    samples->addresses_end = (uint32_t)addresses_end;
    /* Release: a process outside finds the stack complete. */
    atomic_store_explicit(&samples->stacks_end, number + 1, memory_order_release);
    *head = number;
    return number;
}

/* Returns the number of an unused entry for a block, or 0 if there is no
 * room. */
static uint32_t new_block(struct samples *samples) {
    uint32_t number = samples->blocks_free;
    if (number != 0) {
        samples->blocks_free = samples->tables->blocks[number].next;
        return number;
    }
    number = samples->blocks_end;
    if (number == MAX_SAMPLE_BLOCKS ||
        !address_range_reach(&samples->blocks, (number + 1) * sizeof *samples->tables->blocks)) {
        return 0;
    }
    calm_assert(lock_is_mine(&samples->lock) && number < MAX_SAMPLE_BLOCKS, number);
    samples->blocks_end++;
    return number;
}

static uint32_t *block_head(struct samples *samples, const void *block) {
    return &samples->tables->heads.of_blocks[random_mix((uintptr_t)block) % BLOCK_HEADS];
}

static void weight_add(struct sample_weight *sum, struct sample_weight weight) {
    sum->count += weight.count;
    sum->bytes += weight.bytes;
}

/* Between begin_change and end_change the sequence number is odd, so that a
 * process outside ignores the stack. */
static void begin_change(struct samples *samples, struct sample_stack *stack) {
    uint32_t sequence = atomic_load_explicit(&stack->sequence, memory_order_relaxed);
    calm_assert(sequence % 2 == 0 && lock_is_mine(&samples->lock), sequence);
    atomic_store_explicit(&stack->sequence, sequence + 1, memory_order_relaxed);
#ifndef __SANITIZE_THREAD__ /* it does not know fences; this process reads under the lock */
    atomic_thread_fence(memory_order_release);
#endif
    if (stack->epoch != samples->peak_epoch) {
        stack->at_peak = stack->in_use;
        stack->epoch = samples->peak_epoch;
    }
}

static void end_change(struct sample_stack *stack) {
    uint32_t sequence = atomic_load_explicit(&stack->sequence, memory_order_relaxed);
    calm_assert(sequence % 2 == 1, sequence);
    atomic_store_explicit(&stack->sequence, sequence + 1, memory_order_release);
}

bool samples_add(struct samples *samples, const void *block, struct sample_weight weight,
                 const uintptr_t *addresses, size_t depth, uint64_t now_ns) {
    uint64_t signals = samples_enter(samples);
    uint32_t stack_number = find_stack(samples, addresses, depth);
    uint32_t number = stack_number == 0 ? 0 : new_block(samples);
    if (number != 0) {
        uint32_t *head = block_head(samples, block);
        samples->tables->blocks[number] =
            (struct sample_block){(uintptr_t)block, weight, now_ns, stack_number, *head};
        *head = number;
        struct sample_stack *stack = &samples->tables->stacks[stack_number];
        begin_change(samples, stack);
        weight_add(&stack->allocated, weight);
        weight_add(&stack->in_use, weight);
        stack->births += (double)weight.count * (double)now_ns;
        end_change(stack);
        samples->in_use_bytes += weight.bytes;
        if (samples->in_use_bytes > samples->peak_bytes) {
            samples->peak_bytes = samples->in_use_bytes;
            samples->peak_ns = now_ns;
            samples->peak_epoch++;
        }
        atomic_fetch_add_explicit(&samples->live, 1, memory_order_relaxed);
    } else {
        samples_drop(samples);
    }
    samples_leave(samples, signals);
    return number != 0;
}

bool samples_remove(struct samples *samples, const void *block, uint64_t now_ns) {
    uint64_t signals = samples_enter(samples);
    uint32_t *link = block_head(samples, block);
    while (*link != 0 && samples->tables->blocks[*link].block != (uintptr_t)block) {
        link = &samples->tables->blocks[*link].next;
    }
    uint32_t number = *link;
    if (number != 0) {
        struct sample_block *found = &samples->tables->blocks[number];
        struct sample_stack *stack = &samples->tables->stacks[found->stack];
        double count = (double)found->weight.count;
        *link = found->next;
        begin_change(samples, stack);
        calm_assert(stack->in_use.count >= found->weight.count && stack->in_use.bytes >= found->weight.bytes,
                    found->block);
        stack->in_use.count -= found->weight.count;
        stack->in_use.bytes -= found->weight.bytes;
        stack->lifetimes += count * (double)clock_elapsed_ns(now_ns, found->born_ns);
        /* Without blocks in use the sum is exactly 0, so that the rounding
         * error does not accumulate. */
        stack->births = stack->in_use.count == 0 ? 0 : stack->births - count * (double)found->born_ns;
        end_change(stack);
        samples->in_use_bytes -= found->weight.bytes;
        found->next = samples->blocks_free;
        samples->blocks_free = number;
        atomic_fetch_sub_explicit(&samples->live, 1, memory_order_relaxed);
    }
    samples_leave(samples, signals);
    return number != 0;
}

void samples_drop(struct samples *samples) {
    atomic_fetch_add_explicit(&samples->dropped, 1, memory_order_relaxed);
}

size_t samples_count(struct samples *samples, size_t *addresses) {
    uint64_t signals = samples_enter(samples);
    size_t count = atomic_load_explicit(&samples->stacks_end, memory_order_relaxed) - 1;
    *addresses = samples->addresses_end;
    samples_leave(samples, signals);
    return count;
}

/* Converts a sum of count times nanoseconds to nanoseconds. */
static uint64_t to_ns(double sum) {
    double ns = sum / SAMPLE_COUNT_UNIT;
    return ns <= 0 ? 0 : ns >= (double)INT64_MAX ? (uint64_t)INT64_MAX : (uint64_t)ns;
}

struct sample_sums samples_read(struct samples *samples, size_t stack, uint64_t now_ns,
                                const uintptr_t **addresses, size_t *depth) {
    uint64_t signals = samples_enter(samples);
    calm_assert(stack > 0 && stack < atomic_load_explicit(&samples->stacks_end, memory_order_relaxed), stack);
    const struct sample_stack *found = &samples->tables->stacks[stack];
    struct sample_sums sums = {
        .allocated = found->allocated,
        .in_use = found->in_use,
        .at_peak = found->epoch == samples->peak_epoch ? found->at_peak : found->in_use,
        .lifetime_ns = to_ns(found->lifetimes),
        .age_ns = to_ns((double)found->in_use.count * (double)now_ns - found->births),
    };
    *addresses = &samples->tables->addresses[found->first];
    *depth = found->depth;
    samples_leave(samples, signals);
    return sums;
}

size_t samples_bytes(struct samples *samples) {
    uint64_t signals = samples_enter(samples);
    size_t bytes = sizeof samples->tables->heads + samples->stacks.committed + samples->addresses.committed +
                   samples->blocks.committed;
    samples_leave(samples, signals);
    return bytes;
}
