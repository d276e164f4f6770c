#include "api/instance.h"

struct fast_classes calm_classes;
struct cpu_caches calm_caches = CPU_CACHES_UNREADY;
struct cpu_caches calm_new_caches = CPU_CACHES_UNREADY;
struct arenas calm_arenas;
bool calm_new_is_passed_on;
_Atomic(bool) calm_ready;

struct size_classes calm_all_classes;
size_t calm_memory_bytes;

void allocator_use_fast_path(bool use) {
    struct size_classes *all = &calm_all_classes;
    for (size_t i = 0; i < SMALL_SIZES; i++) {
        uint8_t size_class = __atomic_load_n(&all->small[i], __ATOMIC_RELAXED);
        __atomic_store_n(&calm_classes.small[i], use ? size_class : 0, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&calm_classes.max_size, use ? all->max_size : 0, __ATOMIC_RELAXED);
    /* Of this thread and one that refines, at least one sees what the other
     * wrote. */
    atomic_thread_fence(memory_order_seq_cst);
    if (!small_sizes_are_coarse(all->small)) {
        small_sizes_refine(calm_classes.small);
    }
}

/* If a fork happens while another thread is in here, the child finds at least
 * one of the tables coarse, and refines both. */
void allocator_refine_classes(void) {
    if (small_sizes_are_coarse(calm_all_classes.small) || small_sizes_are_coarse(calm_classes.small)) {
        small_sizes_refine(calm_all_classes.small);
        atomic_thread_fence(memory_order_seq_cst);
        small_sizes_refine(calm_classes.small);
    }
}
