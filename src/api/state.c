#include "api/state.h"

struct size_classes calm_classes;
struct size_classes calm_new_classes;
size_t calm_delete_quanta;
struct cpu_caches calm_caches = CPU_CACHES_UNREADY;
struct governor calm_governor;
_Atomic(bool) calm_ready;

struct allocator calm_allocator = {
    .governor = &calm_governor,
    .caches = &calm_caches,
};

static void set_classes(struct size_classes *classes, bool use) {
    const struct size_classes *all = &calm_allocator.classes;
    for (size_t i = 0; i < sizeof all->small; i++) {
        __atomic_store_n(&classes->small[i], use ? all->small[i] : 0, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&classes->max_size, use ? all->max_size : 0, __ATOMIC_RELAXED);
}

void allocator_use_fast_path(bool use) {
    set_classes(&calm_classes, use);
    set_classes(&calm_new_classes, use && calm_new_classes.count > 0);
}
