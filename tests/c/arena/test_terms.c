/* The price of memory, and the memory that is left: when it is read, and what follows. */
#include "arena/terms.h"

#include "arena/epoch.h"
#include "os/filters.h"
#include "os/memory.h"
#include "whole_allocator.h"

/* What the machine is said to have left, of 8 GiB; SIZE_MAX: what it has. */
static size_t room_said = SIZE_MAX;

/* How often the memory's room was read, and how often of these while a thread that frees would have had to
 * wait. */
static _Atomic(int) room_reads;
static _Atomic(int) room_reads_locked;

size_t __real_memory_available_bytes(const char *root, size_t *limit);
size_t __wrap_memory_available_bytes(const char *root, size_t *limit);

size_t __wrap_memory_available_bytes(const char *root, size_t *limit) {
    room_reads++;
    if (lock_try(&calm_arenas.purger.lock)) {
        lock_release(&calm_arenas.purger.lock);
    } else {
        room_reads_locked++;
    }
    if (room_said != SIZE_MAX) {
        *limit = (size_t)8 << 30;
        return room_said;
    }
    return __real_memory_available_bytes(root, limit);
}

static void test_scarce_memory_costs_more(void) {
    set("memory_per_cpu", "auto");
    set("test_cgroup", "on");
    build();
    free_all();
    clock_await_sleep(&calm_arenas.helper.wakeup);
    pass_epoch();
    double once = memory_per_cpu_bytes(&calm_arenas);
    CHECK(once >= 2.0 * 1024 * MIB && once <= 16.0 * 1024 * MIB);
    note_offer(&calm_arenas, (size_t)12 << 30, 1); /* of the time of one CPU */
    CHECK(memory_per_cpu_bytes(&calm_arenas) == 12.0 * 1024 * MIB);
    note_offer(&calm_arenas, (size_t)120 << 30, 1);
    CHECK(memory_per_cpu_bytes(&calm_arenas) == 16.0 * 1024 * MIB);
    unsigned cpus = cpu_set_count(&calm_arenas.helper.cpus);
    note_offer(&calm_arenas, (size_t)cpus * 8 << 30, 1e9);
    double offered = 8;
    CHECK(memory_per_cpu_bytes(&calm_arenas) == offered * 1024 * MIB);
    calm_arenas.machine.scarcity_factor = 0.25;
    CHECK(memory_per_cpu_bytes(&calm_arenas) == offered * 256 * MIB);
    set("memory_per_cpu", "12");
    CHECK(memory_per_cpu_bytes(&calm_arenas) == 3.0 * 1024 * MIB);
    obtain(64 * MIB);
    set("test_policy", "paper");
    uint64_t limit = stats_now().dirty_limit;
    lock_acquire(&calm_arenas.purger.lock);
    calm_arenas.epoch.family_share = 0.5;
    CHECK(memory_per_cpu_bytes(&calm_arenas) == 1.5 * 1024 * MIB);
    lock_release(&calm_arenas.purger.lock);
    arena_refresh(&calm_arenas);
    CHECK(stats_now().dirty_limit <= limit / 2 + page_size);
}

/* Below half of what there is, in proportion. */
static void test_scarcity_is_read(void) {
    static const size_t rooms[] = {(size_t)8 << 30, (size_t)4 << 30, (size_t)1 << 30, 0};
    static const double factors[] = {1, 1, 0.25, 0};
    atomic_store(&calm_arenas.settings.watch_cgroup, 1);
    for (size_t i = 0; i < 4; i++) {
        room_said = rooms[i];
        clock_advance(20 * DEMAND_EPOCH_NS);
        epoch_read_machine(&calm_arenas, true);
        CHECK(calm_arenas.machine.scarcity_factor == factors[i]);
    }
}

/* One that has no table of open files of its own opens none in the program's. */
static void test_helper_opens_no_files(void) {
    atomic_store(&calm_arenas.settings.watch_cgroup, 1);
    atomic_store(&calm_arenas.helper.state, HELPER_RUNS);
    calm_arenas.machine.read_ns = 0;
    calm_arenas.machine.max_footprint = 123 * MIB;
    clock_advance(20 * DEMAND_EPOCH_NS);
    epoch_advance(&calm_arenas, false);
    CHECK_EQUAL(calm_arenas.machine.read_ns, 0);
    CHECK_EQUAL(calm_arenas.machine.max_footprint, 123 * MIB); /* what is known stays known */
    atomic_store(&calm_arenas.helper.state, HELPER_NONE);
    clock_advance(20 * DEMAND_EPOCH_NS);
    epoch_advance(&calm_arenas, false);
    CHECK(!thread_is_single() || calm_arenas.machine.read_ns != 0);
    CHECK_EQUAL(room_reads, thread_is_single() ? 1 : 0);
    CHECK_EQUAL(room_reads_locked, 0); /* a file may be slow to read */
}

/* In a container, whose seccomp filter the program inherits, it is read at the start alone, and stays known.
 */
static void test_room_read_at_start(void) {
    atomic_store(&calm_arenas.settings.watch_cgroup, 1);
    filters_set(FILTERS_INHERITED);
    epoch_read_machine(&calm_arenas, true);
    CHECK_EQUAL(room_reads, 1);
    calm_arenas.machine.max_footprint = 30 * MIB;
    build();
    free_all();
    for (int second = 0; second < 3; second++) {
        clock_await_sleep(&calm_arenas.helper.wakeup);
        clock_advance(10 * DEMAND_EPOCH_NS);
    }
    clock_await_sleep(&calm_arenas.helper.wakeup);
    CHECK_EQUAL(room_reads, 1);
    CHECK(stats_now().dirty_limit <= 10 * MIB);
}

int main(void) {
    prepare_governor();
    in_child(test_scarce_memory_costs_more);
    in_child(test_scarcity_is_read);
    in_child(test_helper_opens_no_files);
    in_child(test_room_read_at_start);
    return 0;
}
