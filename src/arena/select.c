#include "arena/select.h"

#include "base/size.h"

/* An arena is crowded if threads waited this often for its lock within a window
 * of so many acquisitions. A wait costs several times as much as what the lock
 * protects, and the lines of the heap move from CPU to CPU with the lock. */
#define CROWDED_WAITS 4
#define WINDOW_LOCKS  1024

/* Two CPUs seldom wait for each other, and a second heap takes some memory
 * (docs/experiments.md). */
#define MIN_CPUS_FOR_SEVERAL 2.5

unsigned arena_power_above(unsigned number) {
    unsigned power = 1;
    while (power < number) {
        power *= 2;
    }
    return power;
}

unsigned arena_max_for(double cpus) {
    return cpus < MIN_CPUS_FOR_SEVERAL ? 1
           : cpus >= SPACE_MAX_PARTS   ? SPACE_MAX_PARTS
                                       : arena_power_above((unsigned)(cpus + 0.5));
}

static enum arena_state state_of(const struct arenas *arenas, unsigned number) {
    return (enum arena_state)atomic_load_explicit(&arenas->states[number], memory_order_acquire);
}

/* The thread that holds the lock sets the state, so that a signal handler that
 * interrupted it, and a child that lacks it, can tell. */
bool arena_start(struct arenas *arenas, unsigned number) {
    calm_assert(number < MAX_ARENAS, number);
    if (state_of(arenas, number) != ARENA_UNUSED || !lock_try(&arenas->start_lock)) {
        return state_of(arenas, number) == ARENA_READY;
    }
    if (state_of(arenas, number) == ARENA_UNUSED) {
        struct arena *arena = &arenas->of[number];
        const struct heap *first = &arenas->of[0].heap;
        atomic_store_explicit(&arenas->states[number], ARENA_STARTING, memory_order_relaxed);
        arena_prepare(arena);
        bool ready = number < arenas->map.parts
                         ? heap_init_part(&arena->heap, first->classes, &arenas->map, number)
                         : heap_init(&arena->heap, first->classes, HEAP_SPACE_BYTES);
        arena->heap.runs.region_pages = arena->heap.space.quanta > 0 ? first->runs.region_pages : 0;
        runs_set_now(&arena->heap.runs, runs_now(&first->runs));
        /* A fork takes the locks of all arenas below `started` that are ready. */
        uint32_t started = atomic_load_explicit(&arenas->started, memory_order_relaxed);
        if (ready && started <= number) {
            atomic_store_explicit(&arenas->started, number + 1, memory_order_release);
        }
        atomic_store_explicit(&arenas->states[number], ready ? ARENA_READY : ARENA_FAILED,
                              memory_order_release);
    }
    lock_release(&arenas->start_lock);
    return state_of(arenas, number) == ARENA_READY;
}

/* Returns the number of the arena for the calling thread among the first
 * `active` ones. */
static unsigned own_number(const struct arenas *arenas, unsigned active) {
    if (setting_value(&arenas->settings.heaps) > HEAPS_0) {
        return thread_slot(active); /* a test wants that many arenas, however many CPUs there are */
    }
    unsigned cpu = cpu_cache_place(arenas->caches);
    if (arenas->nodes == 1 || active < arenas->nodes) {
        return cpu % active;
    }
    unsigned node = cpu_cache_node(arenas->caches) % arenas->nodes;
    return node + arenas->nodes * (cpu % (active / arenas->nodes));
}

struct arena *arena_own(struct arenas *arenas) {
    unsigned active = atomic_load_explicit(&arenas->active, memory_order_relaxed);
    /* A single arena needs no CPU number. The calling thread may have no
     * thread-local storage from which to read it. */
    unsigned number = active == 1 ? 0 : own_number(arenas, active);
    calm_assert(number < MAX_ARENAS, number, active);
    bool ready = arena_is_ready(arenas, number) || arena_start(arenas, number);
    return &arenas->of[ready ? number : 0];
}

unsigned arena_slot(const struct arenas *arenas, unsigned count) {
    bool by_cpu = !arena_is_alone(arenas);
    return by_cpu ? cpu_cache_place(arenas->caches) % count : thread_slot(count);
}

size_t arena_gather(const struct arenas *arenas, void **blocks, size_t count) {
    const struct arena *arena = arena_of(arenas, blocks[count - 1]);
    void *others[MAX_MAGAZINE_BLOCKS];
    size_t other_count = 0;
    size_t first = count;
    for (size_t i = count; i-- > 0;) {
        if (arena_of(arenas, blocks[i]) == arena) {
            blocks[--first] = blocks[i];
        } else {
            others[other_count++] = blocks[i];
        }
    }
    for (size_t i = 0; i < other_count; i++) {
        blocks[first - 1 - i] = others[i];
    }
    return count - first;
}

bool arena_is_crowded(struct arena *arena) {
    uint64_t locks = atomic_load_explicit(&arena->heap_locks, memory_order_relaxed);
    uint64_t contended = atomic_load_explicit(&arena->contended, memory_order_relaxed);
    bool crowded = contended - arena->window_contended >= CROWDED_WAITS;
    if (crowded || locks - arena->window_locks >= WINDOW_LOCKS) {
        arena->window_locks = locks;
        arena->window_contended = contended;
    }
    return crowded;
}

/* The first step is to an arena for each node. */
void arena_grow(struct arenas *arenas) {
    unsigned active = atomic_load_explicit(&arenas->active, memory_order_relaxed);
    unsigned max = atomic_load_explicit(&arenas->max_active, memory_order_relaxed);
    unsigned wanted = active < arenas->nodes ? arena_power_above(arenas->nodes) : active * 2;
    wanted = wanted < max ? wanted : max;
    if (wanted > active) {
        atomic_compare_exchange_strong_explicit(&arenas->active, &active, wanted, memory_order_relaxed,
                                                memory_order_relaxed);
    }
}

void arena_set_max(struct arenas *arenas, double cpus) {
    unsigned most = arenas->map.parts == 0 ? 1 : arenas->map.parts;
    bool fixed = setting_value(&arenas->settings.heaps) > HEAPS_0;
    if (!fixed) {
        unsigned max = arena_max_for(cpus);
        atomic_store_explicit(&arenas->max_active, max < most ? max : most, memory_order_relaxed);
    }
}

/* Begins behind the arena itself, so that not all arenas that are short turn to
 * the same one. */
struct arena *arena_with(const struct arenas *arenas, const struct arena *arena, size_t pages,
                         uint32_t size_class) {
    unsigned end = atomic_load_explicit(&arenas->started, memory_order_acquire);
    unsigned own = (unsigned)(arena - arenas->of);
    for (unsigned i = 1; i < end; i++) {
        unsigned number = (own + i) % end;
        struct arena *other = (struct arena *)&arenas->of[number];
        bool has = arena_levels(other).dirty >= pages ||
                   (size_class != 0 && heap_may_have(&other->heap, size_class));
        if (has && arena_is_ready(arenas, number)) {
            return other;
        }
    }
    return NULL;
}

struct arena *arena_instead(struct arenas *arenas, const struct arena *arena, unsigned *number) {
    while (*number < arenas->map.parts) {
        unsigned at = (*number)++;
        if (&arenas->of[at] != arena && (arena_is_ready(arenas, at) || arena_start(arenas, at))) {
            return &arenas->of[at];
        }
    }
    if (*number > arenas->map.parts || arenas->map.parts == 0) {
        return NULL;
    }
    unsigned last = (*number)++;
    bool ready = arena_is_ready(arenas, last) || arena_start(arenas, last);
    return ready && &arenas->of[last] != arena ? &arenas->of[last] : NULL;
}
