#include "offload/offload.h"

#include "api/options.h"
#include "arena/select.h"
#include "base/assert.h"
#include "offload/client.h"
#include "offload/client_cache.h"
#include "offload/lifecycle.h"
#include "offload/prefill.h"
#include "offload/serve.h"
#include "offload/sync.h"
#include "os/cgroup.h"
#include "os/text.h"

#include <string.h>

struct offload calm_offload;

static struct server *the_server(void) {
    return &calm_offload.server;
}

/* ---- misuse ---- */

/* What the arena calls. The thread that holds the server's lock may be the
 * server's. */
static void note_misuse(const struct misuse_record *misuse) {
    if (lock_is_mine(&the_server()->lock)) {
        misuse_queue_put(&the_server()->words.misuse, misuse);
    } else {
        calm_offload.misused(misuse);
    }
}

static void report_misuse(void) {
    struct misuse_queue *queue = &the_server()->words.misuse;
    struct misuse_record misuse;
    while (__builtin_expect(!misuse_queue_is_empty(queue), 0) && misuse_queue_take(queue, &misuse)) {
        calm_offload.misused(&misuse);
    }
}

/* ---- blocks ---- */

static unsigned cpu_number(const struct arenas *arenas) {
    return cpu_cache_number(arenas->caches);
}

/* Before the caller does itself what the server did not. */
static void note_direct(void) {
    struct server *server = the_server();
    atomic_fetch_add_explicit(&calm_offload.direct[thread_slot(MISS_COUNTERS)].count, 1,
                              memory_order_relaxed);
    if (!calm_offload.has_server) {
        return;
    }
    if (__builtin_expect(atomic_load_explicit(&server->words.has_leftovers, memory_order_relaxed), 0) &&
        atomic_exchange_explicit(&server->words.has_leftovers, false, memory_order_relaxed)) {
        server_flush(server, 0);
    }
    server_note_operation(server);
}

size_t offload_take_blocks(struct arenas *arenas, uint32_t size_class, void **blocks, size_t count) {
    struct request request = {.size_class = size_class, .blocks = blocks, .count = count, .align_pages = 1};
    size_t got = 0;
    report_misuse();
    if (calm_offload.sync) {
        blocks[0] = NULL;
        got = client_ask_sync(the_server(), size_class, blocks);
    } else if (calm_offload.has_server) {
        got = client_take(the_server(), cpu_number(arenas), &request);
    }
    if (got == 0) {
        note_direct();
        got = arena_take_blocks(arenas, size_class, blocks, count);
    }
    report_misuse();
    return got;
}

void offload_put_blocks(struct arenas *arenas, uint32_t size_class, void *const *blocks, size_t count) {
    void **writable = (void **)(uintptr_t)blocks; /* which are only read */
    struct request request = {.size_class = size_class, .blocks = writable, .count = count};
    bool sent = false;
    report_misuse();
    if (calm_offload.sync && count == 1) {
        void *block = blocks[0];
        sent = client_ask_sync(the_server(), size_class, &block);
    } else if (calm_offload.has_server) {
        sent = client_put(the_server(), cpu_number(arenas), &request);
    }
    if (!sent) {
        note_direct();
        arena_put_blocks(arenas, size_class, blocks, count);
    }
    report_misuse();
}

void *offload_take_large(struct arenas *arenas, size_t pages, size_t align_pages, bool zeroed, bool *zero) {
    void *block;
    struct request request = {
        .blocks = &block, .count = 1, .pages = pages, .align_pages = align_pages, .zeroed = zeroed};
    report_misuse();
    if (calm_offload.has_server && client_take(the_server(), cpu_number(arenas), &request) == 1) {
        *zero = request.zero;
    } else {
        note_direct();
        block = arena_take_large(arenas, pages, align_pages, zeroed, zero);
    }
    report_misuse();
    return block;
}

void offload_put_large(struct arenas *arenas, void *block) {
    const struct span *span = heap_large_span(heap_of(arenas, block), block);
    struct request request = {.blocks = &block, .count = 1};
    report_misuse();
    if (span != NULL) {
        request.bytes = (size_t)span->pages * page_bytes(arenas);
    }
    if (span == NULL || !calm_offload.has_server || !client_put(the_server(), cpu_number(arenas), &request)) {
        note_direct();
        arena_put_large(arenas, block);
    }
    report_misuse();
}

/* ---- all blocks ---- */

static void flush_server(void) {
    if (calm_offload.has_server) {
        server_flush(the_server(), server_long_timeout_ns(the_server()));
    }
}

size_t offload_trim_by_helper(struct arenas *arenas, size_t keep_bytes) {
    flush_server();
    return arena_trim_by_helper(arenas, keep_bytes);
}

size_t offload_trim(struct arenas *arenas, size_t keep_bytes) {
    flush_server();
    size_t purged = arena_trim(arenas, keep_bytes);
    report_misuse();
    return purged;
}

size_t offload_cached(const struct arenas *arenas, size_t *bytes) {
    size_t prepared_bytes = 0;
    size_t blocks = arena_cached(arenas, bytes);
    blocks += calm_offload.has_server ? prefill_blocks(the_server(), &prepared_bytes) : 0;
    *bytes += prepared_bytes;
    return blocks;
}

size_t offload_max_cached(const struct arenas *arenas) {
    size_t bytes = 0;
    size_t blocks = calm_offload.has_server ? prefill_max_blocks(the_server(), &bytes) : 0;
    return arena_max_cached(arenas) + bytes + blocks * page_bytes(arenas);
}

bool offload_is_held(const struct arenas *arenas) {
    return arena_is_held(arenas) || (calm_offload.has_server && server_is_held(the_server()));
}

/* ---- start ---- */

/* Whether there is a CPU for a server; if not, reports why. */
static bool find_cpus(struct server *server) {
    struct cpu_set *allowed = &server->own.survey.view.allowed;
    if (!cpu_affinity(0, allowed)) {
        return false;
    }
    server->own.contention.cpus = cpu_set_count(allowed);
    const char *obstacle = affinity_obstacle(allowed, cgroup_cpu_quota(""));
    if (obstacle != NULL) {
        text_write_line(2, "calmalloc: %s", obstacle);
    }
    return obstacle == NULL;
}

static struct affinity_request requested_cpu(int wanted) {
    static const enum affinity_kind kinds[] = {AFFINITY_AUTO, AFFINITY_SIBLING, AFFINITY_CORE,
                                               AFFINITY_SOCKET};
    int words = sizeof kinds / sizeof *kinds;
    return wanted < words ? (struct affinity_request){kinds[wanted], 0}
                          : (struct affinity_request){AFFINITY_NUMBER, (unsigned)(wanted - words)};
}

bool offload_init(struct arenas *arenas, const struct size_classes *classes, struct cpu_caches *caches,
                  size_t address_space, bool with_depots,
                  void (*misused)(const struct misuse_record *misuse)) {
    calm_offload.misused = misused;
    /* The server owns one heap. */
    atomic_store_explicit(&arenas->settings.heaps, HEAPS_0 + 1, memory_order_relaxed);
    if (!arena_init(arenas, classes, caches, address_space, with_depots, note_misuse)) {
        return false;
    }
    struct server *server = the_server();
    server->setup = (struct server_setup){
        .arenas = arenas,
        .cpu = requested_cpu(calm_options.server_cpu),
        .timeout_ns = (uint64_t)calm_options.test_server_timeout * 1000000U,
    };
    calm_offload.has_server = find_cpus(server) && server_init(server, CLIENT_CACHE_CLASS_BYTES);
    calm_offload.sync = calm_offload.has_server && calm_options.test_sync != 0;
    return true;
}

void offload_caches_start(struct cpu_caches *caches, enum cache_mode mode) {
    cpu_caches_start(caches, mode);
    /* The server may flush caches at any time, and the C library does not know
     * of it: so the program's only thread takes the caches' locks, too. */
    caches->single_without_helper = &thread_not_single;
    cpu_caches_set_helper(caches, true);
}

/* ---- threads, forks and the end ---- */

static bool server_thread_exists(void) {
    return calm_offload.has_server && !thread_is_gone(&the_server()->locked.worker);
}

bool offload_helper_exists(const struct arenas *arenas) {
    return helper_exists(arenas) || server_thread_exists();
}

bool offload_stop_threads(struct arenas *arenas, uint64_t timeout_ns) {
    bool waits = !offload_is_held(arenas);
    bool stopped = helper_stop(arenas, timeout_ns);
    return (!calm_offload.has_server || server_stop(the_server(), waits ? timeout_ns : 0)) && stopped;
}

void offload_before_fork(struct arenas *arenas) {
    bool held = calm_offload.has_server && server_before_fork(the_server(), arena_is_held(arenas));
    arena_before_fork(arenas);
    calm_offload.held_forks = calm_offload.held_forks << 1 | held;
}

void offload_after_fork(struct arenas *arenas, bool child) {
    bool held = (calm_offload.held_forks & 1) != 0;
    calm_offload.held_forks >>= 1;
    arena_after_fork(arenas, child);
    if (!calm_offload.has_server) {
        return;
    }
    if (child) {
        memset(calm_offload.direct, 0, sizeof calm_offload.direct);
        server_start_child(the_server(), held);
    } else {
        server_after_fork_in_parent(the_server(), held);
    }
}

/* The parent had no other threads, and held nothing. */
void offload_start_child(struct arenas *arenas) {
    arena_start_child(arenas);
    if (calm_offload.has_server) {
        server_start_child(the_server(), false);
    }
}

void offload_end(struct arenas *arenas) {
    struct server *server = the_server();
    if (calm_offload.has_server) {
        bool waits = !offload_is_held(arenas);
        atomic_store_explicit(&server->words.thread, THREAD_ENDED, memory_order_seq_cst);
        server_stop(server, waits ? server_long_timeout_ns(server) : 0);
        report_misuse();
    }
    helper_end(arenas);
}

/* ---- counters ---- */

void offload_counters_fill(struct calm_stats *stats) {
    if (calm_offload.has_server && !offload_is_held(the_server()->setup.arenas)) {
        server_catch_up(the_server(), server_long_timeout_ns(the_server()));
    }
    counters_fill(stats);
}

void offload_counters_print(struct text *text, const char *format) {
    counters_print(text, format);
    const struct server_counts *counts = &the_server()->counts;
    struct endpoint_sums clients =
        calm_offload.has_server ? client_counts(the_server()) : (struct endpoint_sums){0};
    uint64_t direct = 0;
    for (unsigned i = 0; i < MISS_COUNTERS; i++) {
        direct += atomic_load_explicit(&calm_offload.direct[i].count, memory_order_relaxed);
    }
    const struct {
        const char *name;
        uint64_t value;
    } more[] = {
        {"offload_hits", clients.hits},
        {"offload_misses", clients.misses},
        {"offload_calls", counts->calls},
        {"offload_messages", counts->records},
        {"offload_prefilled", counts->prefilled},
        {"offload_prefill_unused", counts->prefill_unused},
        {"offload_wakeups", counts->wakes},
        {"offload_sleeps", counts->naps},
        {"offload_unresponsive", counts->late},
        {"offload_direct", direct},
        {"offload_shared_switches", counts->pauses},
    };
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        text_format(text, format, more[i].name, more[i].value, more[i].name);
    }
}
