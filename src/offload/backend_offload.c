#include "offload/backend_offload.h"

#include "calmalloc.h"
#include "governor/blocks.h"
#include "governor/check.h"
#include "governor/epoch.h"
#include "governor/governor.h"
#include "governor/helper.h"
#include "governor/large.h"
#include "offload/client.h"
#include "offload/stock.h"
#include "os/cgroup.h"
#include "os/lock.h"
#include "os/syscall.h"
#include "os/text.h"
#include "os/thread.h"

/* What a server makes resident while its caller waits, about a quarter of a millisecond's work. */
#define MAX_POPULATED_BYTES ((size_t)1 << 20)

struct offload calm_offload;

static struct offload *offload_of(struct backend *backend) {
    return (struct offload *)(void *)backend;
}

static void print(const char *message) {
    struct text line = {0};
    text_string(&line, "calmalloc: ");
    text_string(&line, message);
    text_string(&line, "\n");
    text_write(&line, 2);
}

/* ---- the second heap ---- */

static struct governor *second_if_made(const struct offload *offload) {
    bool made = atomic_load_explicit(&offload->second_made, memory_order_acquire) > 0;
    return made ? (struct governor *)(uintptr_t)&offload->second : NULL;
}

static void copy_setting(_Atomic(int) *to, const _Atomic(int) *from) {
    atomic_store_explicit(to, atomic_load_explicit(from, memory_order_relaxed), memory_order_relaxed);
}

/* Makes the second heap when it is first needed; NULL if memory is short. Its settings are the first one's.
 */
static struct governor *second_heap(struct offload *offload) {
    if (atomic_load_explicit(&offload->second_made, memory_order_acquire) == 0) {
        lock_acquire(&offload->second_lock);
        if (atomic_load_explicit(&offload->second_made, memory_order_relaxed) == 0) {
            const struct governor *first = offload->backend.governor;
            struct governor *second = &offload->second;
            second->purger_may_stop =
                true; /* the server purges it, and this heap is needed while a debugger stops that */
            copy_setting(&second->settings.policy, &first->settings.policy);
            copy_setting(&second->settings.slack, &first->settings.slack);
            copy_setting(&second->settings.purge_time, &first->settings.purge_time);
            bool made = governor_init(second, first->heap.classes, &offload->no_caches, HEAP_SPACE_BYTES,
                                      false, first->misused);
            atomic_store_explicit(&offload->second_made, made ? 1 : -1, memory_order_release);
        }
        lock_release(&offload->second_lock);
    }
    return second_if_made(offload);
}

static bool is_second(const struct offload *offload, const void *block) {
    const struct governor *second = second_if_made(offload);
    return second != NULL && space_page(&second->heap.space, block) != 0;
}

/* ---- asking the server ---- */

static unsigned cpu_number(const struct offload *offload) {
    (void)offload;
    return cpu_cache_number();
}

/* Runs work(subject) at the heap if it is in shared mode. False if the server has it back: then it is to be
 * asked. */
static bool run_in_shared_mode(struct offload *offload, void (*work)(void *subject), void *subject) {
    struct endpoint *borrowed = client_borrow(&offload->server, cpu_number(offload));
    if (borrowed != NULL) {
        work(subject);
        client_return(borrowed);
    }
    return borrowed != NULL;
}

/* Has the server run work(subject), or runs it in shared mode. False if the server does not answer. */
static bool run_at_heap(struct offload *offload, enum call_kind kind, void (*work)(void *subject),
                        void *subject) {
    for (;;) {
        enum answer answer = client_run(&offload->server, cpu_number(offload), kind, work, subject);
        if (answer != ANSWER_LENT) {
            return answer == ANSWER_DONE;
        }
        if (run_in_shared_mode(offload, work, subject)) {
            return true;
        }
    }
}

struct misuses {
    struct governor *governor;
    size_t count;
    struct misuse_note notes[MISUSE_NOTES];
};

static void collect_misuse(void *subject) {
    struct misuses *this = subject;
    atomic_store_explicit(&this->governor->misuse_waits, false, memory_order_relaxed);
    this->count = governor_take_misuse(this->governor, this->notes);
}

/* Reports misuse that the server found, on the thread that calls it. */
static void report_misuse(struct offload *offload) {
    struct governor *governor = offload->backend.governor;
    if (__builtin_expect(!atomic_load_explicit(&governor->misuse_waits, memory_order_relaxed), 1)) {
        return;
    }
    struct misuses this = {.governor = governor};
    run_at_heap(offload, CALL_SHORT, collect_misuse, &this);
    for (size_t i = 0; i < this.count; i++) {
        governor->misused(this.notes[i].kind, this.notes[i].pointer);
    }
}

/* ---- blocks ---- */

struct blocks {
    struct governor *governor;
    uint32_t class;
    void **blocks;
    size_t count;
};

static void take_shared(void *subject) {
    struct blocks *this = subject;
    this->count = governor_take_blocks(this->governor, this->class, this->blocks, this->count);
}

static void put_shared(void *subject) {
    const struct blocks *this = subject;
    governor_put_blocks(this->governor, this->class, this->blocks, this->count);
}

static enum answer ask_for_blocks(struct offload *offload, uint32_t class, void **blocks, size_t count,
                                  size_t *got) {
    if (offload->options.sync) {
        enum answer answer = client_take_sync(&offload->server, class, blocks);
        *got = answer == ANSWER_DONE && blocks[0] != NULL;
        return answer;
    }
    return client_take(&offload->server, cpu_number(offload), class, blocks, count, got);
}

/* Blocks of the first heap. False, and none, if the server does not answer. */
static bool take_served(struct offload *offload, struct blocks *this) {
    for (;;) {
        size_t wanted = this->count;
        enum answer answer = ask_for_blocks(offload, this->class, this->blocks, wanted, &this->count);
        if (answer == ANSWER_DONE) {
            return true;
        }
        this->count = wanted;
        if (answer == ANSWER_LOST) {
            return false;
        }
        if (run_in_shared_mode(offload, take_shared, this)) {
            report_misuse(offload);
            return true;
        }
    }
}

/* As take_large: either heap may have memory where the other has none. */
static struct taken take_blocks(struct backend *backend, uint32_t class, void **blocks, size_t count) {
    struct offload *offload = offload_of(backend);
    report_misuse(offload);
    struct blocks this = {backend->governor, class, blocks, count};
    bool served = take_served(offload, &this);
    if (served && (this.count > 0 || second_if_made(offload) == NULL)) {
        return (struct taken){this.count, true};
    }
    struct governor *second = second_heap(offload);
    size_t got = second == NULL ? 0 : governor_take_blocks(second, class, blocks, 1);
    if (got > 0 || served || !run_at_heap(offload, CALL_LONG, take_shared, &this)) {
        return (struct taken){got, false};
    }
    return (struct taken){this.count, true};
}

static bool send_blocks(struct offload *offload, uint32_t class, void *const *blocks, size_t count) {
    if (offload->options.sync && count == 1) {
        enum answer answer = client_put_sync(&offload->server, class, blocks[0]);
        if (answer != ANSWER_LOST) {
            return answer == ANSWER_DONE;
        }
    }
    return client_put(&offload->server, cpu_number(offload), class, blocks, count);
}

static void put_blocks(struct backend *backend, uint32_t class, void *const *blocks, size_t count) {
    struct offload *offload = offload_of(backend);
    report_misuse(offload);
    if (is_second(offload, blocks[0])) {
        governor_put_blocks(&offload->second, class, blocks, count);
        server_wake(&offload->server); /* which purges the second heap */
        return;
    }
    struct blocks shared = {backend->governor, class, (void **)(uintptr_t)blocks, count};
    while (!send_blocks(offload, class, blocks, count)) {
        if (run_in_shared_mode(offload, put_shared, &shared)) {
            report_misuse(offload);
            return;
        }
    }
}

/* ---- large blocks ---- */

struct large {
    struct governor *governor;
    void *block;
    size_t pages;
    size_t align_pages;
    bool zeroed;
    bool zero;
    bool populates; /* by the caller, once it has left the heap */
};

static void plan_populate(void *subject) {
    struct large *this = subject;
    this->populates = governor_may_populate(this->governor, this->block, this->pages);
}

static void take_large_shared(void *subject) {
    struct large *this = subject;
    this->block = governor_take_large(this->governor, this->pages, this->align_pages, &this->zero);
    if (this->block != NULL && this->zeroed && this->zero) {
        plan_populate(this);
    }
}

static void put_large_shared(void *subject) {
    const struct large *this = subject;
    governor_put_large(this->governor, this->block);
}

/* Whether the server makes so large a block resident for a calloc; else its caller does, since no other
 * client is served meanwhile. */
static bool server_populates(size_t pages) {
    return pages * os_page_size() <= MAX_POPULATED_BYTES;
}

/* A block of the first heap. False, and none, if the server does not answer. */
static bool take_large_served(struct offload *offload, struct large *this) {
    for (;;) {
        enum answer answer =
            client_take_large(&offload->server, cpu_number(offload), this->pages, this->align_pages,
                              this->zeroed ? TAKE_ZEROED : 0, &this->block, &this->zero);
        if (answer == ANSWER_LOST) {
            return false;
        }
        if (answer == ANSWER_DONE) {
            if (this->block != NULL && this->zeroed && this->zero && !server_populates(this->pages)) {
                run_at_heap(offload, CALL_SHORT, plan_populate, this);
            }
            return true;
        }
        if (run_in_shared_mode(offload, take_large_shared, this)) {
            return true;
        }
    }
}

/* Each heap may have room where the other has none: the second one is asked first while the server does not
 * answer, and then a longer wait for the server is worth it. */
static void *take_large(struct backend *backend, size_t pages, size_t align_pages, bool zeroed, bool *zero) {
    struct offload *offload = offload_of(backend);
    struct large this = {backend->governor, NULL, pages, align_pages, zeroed, false, false};
    report_misuse(offload);
    bool served = take_large_served(offload, &this);
    struct governor *second = served ? second_if_made(offload) : second_heap(offload);
    if (this.block == NULL && second != NULL) {
        this.governor = second;
        take_large_shared(&this);
    }
    if (this.block == NULL && !served) {
        this.governor = backend->governor;
        run_at_heap(offload, CALL_LONG, take_large_shared, &this);
    }
    if (this.populates) {
        governor_populate(this.governor, this.block, pages);
    }
    *zero = this.zero;
    return this.block;
}

static void put_large(struct backend *backend, void *block) {
    struct offload *offload = offload_of(backend);
    struct large this = {.governor = backend->governor, .block = block};
    report_misuse(offload);
    if (is_second(offload, block)) {
        governor_put_large(&offload->second, block);
        server_wake(&offload->server); /* which purges the second heap */
        return;
    }
    const struct span *span = heap_large_span(&backend->governor->heap, block);
    if (span == NULL) {
        /* Misuse: the server finds out what kind. */
        run_at_heap(offload, CALL_SHORT, put_large_shared, &this);
        report_misuse(offload);
        return;
    }
    size_t bytes = (size_t)span->pages << backend->governor->heap.space.page_shift;
    while (!client_put_large(&offload->server, cpu_number(offload), block, bytes)) {
        if (run_in_shared_mode(offload, put_large_shared, &this)) {
            report_misuse(offload);
            return;
        }
    }
}

static void resize(void *subject) {
    struct large *this = subject;
    struct span *span = heap_large_span(&this->governor->heap, this->block);
    this->block = span == NULL ? NULL : governor_resize_large(this->governor, span, this->pages);
}

static void *resize_large(struct backend *backend, void *block, size_t pages) {
    struct offload *offload = offload_of(backend);
    struct large this = {.governor = backend->governor, .block = block, .pages = pages};
    if (is_second(offload, block)) {
        this.governor = &offload->second;
        resize(&this);
        return this.block;
    }
    return run_at_heap(offload, CALL_SHORT, resize, &this) ? this.block : NULL;
}

static struct heap *heap_of(struct backend *backend, const void *block) {
    struct heap *heap = &backend->governor->heap;
    if (space_page(&heap->space, block) != 0) {
        return heap;
    }
    struct offload *offload = offload_of(backend);
    return is_second(offload, block) ? &offload->second.heap : NULL;
}

/* ---- both heaps ---- */

struct task {
    struct offload *offload;
    void (*work)(struct governor *governor, void *subject);
    void *subject;
};

/* After all that was sent to the server. In shared mode nothing is there to serve. */
static void run_task(void *subject) {
    const struct task *this = subject;
    struct governor *governor = this->offload->backend.governor;
    if (governor->exclusive) {
        server_serve(&this->offload->server);
    }
    this->work(governor, this->subject);
}

static bool run(struct backend *backend, void (*work)(struct governor *governor, void *subject),
                void *subject) {
    struct offload *offload = offload_of(backend);
    struct task task = {offload, work, subject};
    bool done = run_at_heap(offload, CALL_LONG, run_task, &task);
    struct governor *second = second_if_made(offload);
    if (second != NULL) {
        work(second, subject);
    }
    report_misuse(offload);
    return done;
}

struct trim {
    size_t keep_bytes;
    size_t purged_bytes;
};

/* The two heaps together keep no more than keep_bytes: the second one nothing. */
static void trim_one(struct governor *governor, void *subject) {
    struct trim *this = subject;
    this->purged_bytes += governor_trim(governor, this->keep_bytes);
    this->keep_bytes = 0;
}

static size_t trim(struct backend *backend, size_t keep_bytes) {
    struct trim this = {keep_bytes, 0};
    run(backend, trim_one, &this);
    return this.purged_bytes;
}

static size_t trim_by_helper(struct backend *backend, size_t keep_bytes) {
    struct governor *second = second_if_made(offload_of(backend));
    size_t purged = second == NULL ? 0 : governor_trim_by_helper(second, 0);
    return purged + governor_trim_by_helper(backend->governor, keep_bytes);
}

/* ---- what the server does on the heap ---- */

static size_t serve_take(void *context, uint32_t class, void **blocks, size_t count, unsigned flags) {
    struct offload *offload = context;
    return governor_take_blocks_exclusive(offload->backend.governor, class, blocks, count,
                                          (flags & TAKE_AT_ONCE) == 0);
}

static void serve_put(void *context, uint32_t class, void *const *blocks, size_t count) {
    struct offload *offload = context;
    governor_put_blocks(offload->backend.governor, class, blocks, count);
}

static void *serve_take_large(void *context, size_t pages, size_t align_pages, unsigned flags, bool *zero) {
    struct governor *governor = ((struct offload *)context)->backend.governor;
    void *block =
        governor_take_large_exclusive(governor, pages, align_pages, zero, (flags & TAKE_AT_ONCE) == 0);
    if (block != NULL && *zero && (flags & TAKE_ZEROED) != 0 && server_populates(pages) &&
        governor_may_populate(governor, block, pages)) {
        governor_populate(governor, block, pages);
    }
    return block;
}

static void serve_put_large(void *context, void *block) {
    struct offload *offload = context;
    governor_put_large(offload->backend.governor, block);
}

static uint32_t class_of(void *context, const void *block) {
    const struct offload *offload = context;
    const struct space *space = &offload->backend.governor->heap.space;
    uint32_t page = space_page(space, block);
    return page == 0 ? 0 : space->class_of[page];
}

/* Of both heaps, as the second one has no helper. */
static bool tick(void *context) {
    struct offload *offload = context;
    struct governor *governor = offload->backend.governor;
    if (governor->visited != NULL) {
        governor->visited();
    }
    struct governor *second = second_if_made(offload);
    bool idle = second == NULL || governor_tick(second, true);
    return governor_tick(governor, true) && idle;
}

static void set_shared(void *context, enum lending lending) {
    static const enum shared_mode modes[] = {
        [LEND_TENDED] = SHARED_TENDED, [LEND_UNTENDED] = SHARED_UNTENDED, [LEND_FOR_GOOD] = SHARED_FOR_GOOD};
    struct offload *offload = context;
    governor_set_shared(offload->backend.governor, modes[lending]);
}

static void set_exclusive(void *context) {
    struct offload *offload = context;
    governor_set_exclusive(offload->backend.governor, &offload->heap_ops);
}

static void between_slices(void *context) {
    server_serve_between(&((struct offload *)context)->server);
}

static size_t cached(const void *context, size_t *bytes) {
    return stock_blocks(&((const struct offload *)context)->server, bytes);
}

static void flush(void *context) {
    stock_withdraw_all(&((struct offload *)context)->server);
}

/* ---- the server's thread ---- */

bool offload_is_possible(struct offload *offload) {
    struct cpu_set *allowed = &offload->survey.view.allowed;
    if (!cpu_affinity(0, allowed)) {
        return false;
    }
    switch (place_should_decline(allowed, cgroup_cpu_quota())) {
    case PLACE_DECLINE_ONE_CPU:
        print("offload needs a CPU of its own, and there is but one: running without it");
        return false;
    case PLACE_DECLINE_QUOTA:
        print("offload needs a CPU of its own, and the control group may use less than two: running without "
              "it");
        return false;
    case PLACE_NO_DECLINE:
        break;
    }
    return true;
}

static void report_choice(struct offload *offload, enum place_reason reason) {
    static const char *const messages[] = {
        [PLACE_NOT_ALLOWED] = "offload_cpu is not a CPU that the process may run on: choosing one",
        [PLACE_NO_SIBLING] =
            "offload_cpu=sibling, but there is no free hyperthread of that core: choosing a CPU",
        [PLACE_NO_CORE] = "offload_cpu=core, but there is no other core of that socket: choosing a CPU",
        [PLACE_NO_SOCKET] = "offload_cpu=socket, but there is no other socket: choosing a CPU",
    };
    if (!offload->reported && reason != PLACE_MET && reason != PLACE_ONE_CPU) {
        offload->reported = true;
        print(messages[reason]);
    }
}

/* Differs for processes that start together, also where each is the first of its container: the end of the
 * address space is randomized. */
static uint64_t seed(void) {
    return (uint64_t)os_syscall(SYS_getpid, 0, 0, 0, 0, 0, 0) * 0x9e3779b97f4a7c15ULL ^
           (uint64_t)(uintptr_t)thread_pointer();
}

/* On the server, when it starts and when it takes the heap back. */
static void choose_cpu(void *context) {
    struct offload *offload = context;
    int self = (int)os_syscall(SYS_gettid, 0, 0, 0, 0, 0, 0);
    place_look(&offload->survey, TOPOLOGY_MACHINE, self, CPUS_MOST);
    struct place_choice choice = place_choose(&offload->survey.view, offload->options.cpu, seed());
    report_choice(offload, choice.reason);
    thread_leave_files(); /* so that its files in /proc and /sys are not the program's; it prints nothing any
                             more */
    offload->server.keeps = offload->options.cpu.kind == PLACE_NUMBER && choice.reason == PLACE_MET;
    if (choice.cpu >= 0) {
        cpu_pin((unsigned)choice.cpu);
    }
}

static void report_unresponsive(void *context) {
    (void)context;
    print("the offload server does not answer: serving without it");
}

/* ---- start, fork and end ---- */

static uint64_t count(const _Atomic(uint64_t) *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void add_counters(const struct backend *backend, struct calm_stats *stats) {
    const struct server *server = &((const struct offload *)(const void *)backend)->server;
    struct endpoint_sums clients = client_counts(server);
    const struct server_counts *counts = &server->counts;
    size_t bytes;
    stats->cached_limit += stock_blocks_most(server, &bytes) * os_page_size() + bytes;
    stats->offload_hits = clients.hits;
    stats->offload_misses = clients.misses;
    stats->offload_calls = count(&counts->calls);
    stats->offload_records = count(&counts->records);
    stats->offload_stocked = count(&counts->stocked);
    stats->offload_unused = count(&counts->unused);
    stats->offload_wakes = count(&server->wakes);
    stats->offload_naps = count(&counts->naps);
    stats->offload_lent = count(&counts->lent);
    stats->offload_lost = count(&server->losses);
}

static bool has_threads(const struct backend *backend) {
    (void)backend;
    return true;
}

/* Whether the caller interrupted itself within a heap. */
static bool holds_heap(const struct offload *offload) {
    const struct governor *second = second_if_made(offload);
    return governor_is_held(offload->backend.governor) || (second != NULL && governor_is_held(second));
}

static enum interrupted interrupted(const struct backend *backend) {
    const struct offload *offload = (const struct offload *)(const void *)backend;
    return holds_heap(offload) || server_is_held(&offload->server) ? INTERRUPTED_HOLDER
           : server_interrupts_client(&offload->server)            ? INTERRUPTED_CLIENT
                                                                   : INTERRUPTED_NOTHING;
}

static void before_fork(struct backend *backend) {
    struct offload *offload = offload_of(backend);
    /* The server would wait for a thread that a signal handler interrupted within a heap, to fork. */
    server_before_fork(&offload->server, holds_heap(offload));
    lock_acquire_for_fork(&offload->second_lock, true);
    if (second_if_made(offload) != NULL) {
        governor_before_fork(&offload->second);
    }
    governor_before_fork(backend->governor);
}

static void after_fork(struct backend *backend, bool child) {
    struct offload *offload = offload_of(backend);
    governor_after_fork(backend->governor, child);
    if (second_if_made(offload) != NULL) {
        governor_after_fork(&offload->second, child);
    }
    lock_release_after_fork(&offload->second_lock);
    server_after_fork(&offload->server, child);
}

static bool stop_threads(struct backend *backend, uint64_t timeout_ns) {
    struct server *server = &offload_of(backend)->server;
    bool gone = helper_stop(backend->governor, timeout_ns);
    bool started = atomic_load_explicit(&server->thread, memory_order_seq_cst) == THREAD_STARTED;
    if (started && server_stop(server, timeout_ns)) {
        while (!thread_is_gone(&server->worker)) {
            thread_wait(&server->worker, 0);
        }
    }
    thread_wait_uncounted(&server->worker, timeout_ns);
    return gone;
}

static void end(struct backend *backend) {
    struct offload *offload = offload_of(backend);
    if (server_stop(&offload->server, PATIENCES * offload->server.patience_ns)) {
        report_misuse(offload);
    }
    governor_end(backend->governor);
}

static const struct backend_functions functions = {
    take_blocks,    put_blocks,   take_large,  put_large,   resize_large, heap_of,    run,          trim,
    trim_by_helper, add_counters, has_threads, interrupted, before_fork,  after_fork, stop_threads, end,
};

struct backend *offload_open(struct offload *offload, const struct offload_options *options,
                             struct governor *governor) {
    offload->backend = (struct backend){&functions, governor};
    offload->options = *options;
    struct server *server = &offload->server;
    server->owner = (struct owner){
        .context = offload,
        .classes = &governor->heap.classes[0],
        .take = serve_take,
        .put = serve_put,
        .take_large = serve_take_large,
        .put_large = serve_put_large,
        .class_of = class_of,
        .tick = tick,
        .lend = set_shared,
        .take_back = set_exclusive,
        .page_size = os_page_size(),
    };
    server->patience_ns = (uint64_t)options->timeout_ms * 1000000U;
    server->settle = choose_cpu;
    server->lost = report_unresponsive;
    server->crowd.cpus = cpu_set_count(&offload->survey.view.allowed);
    offload->heap_ops = (struct heap_ops){offload, between_slices, cached, flush};
    return server_init(server, governor->caches->count, SPARE_CLASS_BYTES) ? &offload->backend : NULL;
}
