/* Where restartable sequences cannot be trusted, the CPU caches have locks, and a counter says why. Where the
 * kernel reports nodes, the depots and heaps belong to them. The allocator starts before main: each case is a
 * program of its own, and the variable CASE says what it finds.
 */
#include "api/instance.h"
#include "os/rseq_check.h"

#include "check.h"

#include <stdlib.h>
#include <string.h>

static bool is_case(const char *name) {
    const char *value = getenv("CASE");
    return value != NULL && strcmp(value, name) == 0;
}

bool __wrap_rseq_can_restart(void);
bool __wrap_rseq_is_broken(const struct rseq_offsets *offsets);

bool __wrap_rseq_can_restart(void) {
    return !is_case("no fence");
}

bool __wrap_rseq_is_broken(const struct rseq_offsets *offsets) {
    CHECK(offsets->usable);
    return is_case("broken");
}

/* Two nodes, of so many CPUs that each node has a depot. */
unsigned __wrap_nodes_possible(void);
unsigned __real_cpu_set_count(const struct cpu_set *set);
unsigned __wrap_cpu_set_count(const struct cpu_set *set);

unsigned __wrap_nodes_possible(void) {
    return is_case("nodes") ? 2 : 1;
}

unsigned __wrap_cpu_set_count(const struct cpu_set *set) {
    return is_case("nodes") ? 16 : __real_cpu_set_count(set);
}

static const char *program;
static const char *name;
static const char *options;
static enum cache_mode mode;
static enum cache_lock_reason reason;
static unsigned nodes = 1;

static void run_case(void) {
    char expected[64];
    snprintf(expected, sizeof expected, "%d %d %u", mode, reason, nodes);
    setenv("CASE", name, 1);
    setenv("CALM_OPTIONS", options, 1);
    execl(program, program, expected, (char *)NULL);
    CHECK(false);
}

static void expect(const char *what, const char *how, enum cache_mode found, enum cache_lock_reason why) {
    name = what;
    options = how;
    mode = found;
    reason = why;
    in_child(run_case);
}

int main(int count, char **arguments) {
    if (count > 1) {
        struct calm_stats stats;
        char found[64];
        calm_free(calm_malloc(100));
        CHECK_EQUAL(calm_stats(&stats, sizeof stats), 0);
        snprintf(found, sizeof found, "%d %d %u", calm_caches.mode, (int)stats.cache_lock_reason,
                 calm_arenas.nodes);
        printf("%s: %s, to be %s\n", getenv("CASE"), found, arguments[1]);
        return strcmp(found, arguments[1]) != 0;
    }
    program = arguments[0];
    expect("an option", "test_cache=off", CACHE_OFF, LOCKS_NONE);
    expect("an option", "test_cache=locked", CACHE_LOCKED, LOCKS_WANTED);
    if (!rseq_find().usable) {
        expect("no sequences", "", CACHE_LOCKED, LOCKS_UNREGISTERED);
        return 0;
    }
    expect("sound", "", CACHE_RSEQ, LOCKS_NONE);
    expect("no fence", "", CACHE_LOCKED, LOCKS_NO_FENCE);
    expect("broken", "", CACHE_LOCKED, LOCKS_BROKEN);
    nodes = rseq_find().node == 0 ? 1 : 2; /* Linux reports a thread's node from 6.3 on */
    expect("nodes", "", CACHE_RSEQ, LOCKS_NONE);
    return 0;
}
