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
    const struct size_classes *all = &calm_all_classes;
    for (size_t i = 0; i < SMALL_SIZES; i++) {
        __atomic_store_n(&calm_classes.small[i], use ? all->small[i] : 0, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&calm_classes.max_size, use ? all->max_size : 0, __ATOMIC_RELAXED);
}
