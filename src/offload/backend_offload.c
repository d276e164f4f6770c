#include "offload/backend_offload.h"

#include "calmalloc.h"
#include "governor/blocks.h"
#include "governor/check.h"
#include "governor/epoch.h"
#include "governor/governor.h"
#include "governor/helper.h"
#include "governor/large.h"
#include "offload/client.h"
#include "offload/lifecycle.h"
#include "offload/prefill.h"
#include "offload/serve.h"
#include "offload/sync.h"
#include "os/cgroup.h"
#include "os/lock.h"
#include "os/random.h"
#include "os/syscall.h"
#include "os/text.h"
#include "os/thread.h"

struct offload calm_offload;

static struct offload *offload_of(struct backend *backend) {
    return (struct offload *)(void *)backend;
}

static void offload_print(const char *message) {
    text_write_line(2, "calmalloc: %s", message);
}

/* ---- the second heap ---- */

static struct governor *second_if_made(const struct offload *offload) {
    bool made = atomic_load_explicit(&offload->second_made, memory_order_acquire) > 0;
    return made ? (struct governor *)(uintptr_t)&offload->second : NULL;
}

/* Makes the second heap when it is first needed, with the first one's settings; NULL if memory is short. */
static struct governor *second_heap(struct offload *offload) {
    if (atomic_load_explicit(&offload->second_made, memory_order_acquire) == 0) {
        lock_acquire(&offload->second_lock);
        if (atomic_load_explicit(&offload->second_made, memory_order_relaxed) == 0) {
            const struct governor *first = offload->backend.governor;
            struct governor *second = &offload->second;
            /* The server purges it, and it is needed while a debugger stops the server. */
            second->purger_may_stop = true;
            governor_copy_settings(second, first);
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
    return cpu_cache_number(offload->backend.governor->caches);
}

/* Puts blocks of a class, or, if it is 0, a large one. */
static void put_into(struct governor *governor, uint32_t class, void *const *blocks, size_t count) {
    if (class != 0) {
        governor_put_blocks(governor, class, blocks, count);
    } else {
        governor_put_large(governor, blocks[0]);
    }
}

static void take_from(struct governor *governor, struct request *this, bool prefaults) {
    if (this->class != 0) {
        this->count = governor_take_blocks(governor, this->class, this->blocks, this->count, prefaults);
    } else {
        this->blocks[0] = governor_take_large(governor, this->pages, this->align_pages, this->zeroed,
                                              prefaults, &this->zero);
        this->count = this->blocks[0] != NULL;
    }
}

/* Does itself what is requested. */
static void do_request(void *subject) {
    struct request *this = subject;
    if (request_runs_work(this)) {
        this->work(this->subject);
    } else if (this->kind == REQUEST_PUT) {
        put_into(this->governor, this->class, this->blocks, this->count);
    } else {
        take_from(this->governor, this, false);
    }
}

static enum answer ask(struct offload *offload, struct request *request) {
    bool takes = request->kind == REQUEST_TAKE;
    if (offload->options.sync && request->class != 0 && (takes || request->count == 1)) {
        enum answer answer = client_ask_sync(&offload->server, request);
        if (takes || answer != ANSWER_UNRESPONSIVE) {
            return answer;
        }
    }
    return client_ask(&offload->server, cpu_number(offload), request);
}

/* Has the server do what is requested, or does it itself while the heap is in shared mode; the answer says
 * which. If the server has the heap back by then, it is asked again. */
static enum answer serve(struct offload *offload, struct request *request) {
    for (;;) {
        enum answer answer = ask(offload, request);
        if (answer != ANSWER_SHARED) {
            return answer;
        }
        struct endpoint *endpoint = client_enter_shared(&offload->server, cpu_number(offload));
        if (endpoint != NULL) {
            do_request(request);
            client_leave_shared(endpoint);
            return ANSWER_SHARED;
        }
    }
}

/* Has work(subject) run by the server, or runs it in shared mode. False if the server does not answer. */
static bool run_at_heap(struct offload *offload, enum request_kind kind, void (*work)(void *subject),
                        void *subject) {
    struct request request = {.kind = kind, .work = work, .subject = subject};
    return serve(offload, &request) != ANSWER_UNRESPONSIVE;
}

struct misuses {
    struct governor *governor;
    size_t count;
    struct misuse_record notes[MISUSE_RECORDS];
};

static void collect_misuse(void *subject) {
    struct misuses *this = subject;
    atomic_store_explicit(&this->governor->misuse_waits, false, memory_order_relaxed);
    this->count = governor_take_misuse(this->governor, this->notes);
}

/* Reports misuse that the server found, on the thread that calls it. */
static void offload_report_misuse(struct offload *offload) {
    struct governor *governor = offload->backend.governor;
    if (__builtin_expect(!atomic_load_explicit(&governor->misuse_waits, memory_order_relaxed), 1)) {
        return;
    }
    struct misuses this = {.governor = governor};
    run_at_heap(offload, REQUEST_RUN, collect_misuse, &this);
    for (size_t i = 0; i < this.count; i++) {
        governor->misused(&this.notes[i]);
    }
}

/* ---- blocks ---- */

/* Takes from the first heap or the second, which this->governor says then; this->count is 0 if both are short
 * of memory. The second is asked first while the server does not answer, and then a longer wait for the
 * server is worth it. */
static void offload_take(struct offload *offload, struct request *this) {
    size_t wanted = this->count;
    offload_report_misuse(offload);
    enum answer answer = serve(offload, this);
    offload_report_misuse(offload);
    bool served = answer != ANSWER_UNRESPONSIVE;
    this->count = served ? this->count : 0;
    struct governor *first = this->governor;
    struct governor *second = served ? second_if_made(offload) : second_heap(offload);
    if (this->count == 0 && second != NULL) {
        this->governor = second;
        this->count = 1;
        do_request(this);
    }
    if (this->count == 0 && !served) {
        this->governor = first;
        this->count = wanted;
        bool ran = run_at_heap(offload, REQUEST_RUN_LONG, do_request, this);
        this->count = ran ? this->count : 0;
    }
}

static struct taken offload_take_blocks(struct backend *backend, uint32_t class, void **blocks,
                                        size_t count) {
    struct request this = request_for(REQUEST_TAKE, backend->governor, class, blocks, count);
    offload_take(offload_of(backend), &this);
    return (struct taken){this.count, this.governor == backend->governor};
}

/* Returns blocks to the heap that has them. */
static void offload_put(struct offload *offload, struct request *this) {
    offload_report_misuse(offload);
    if (is_second(offload, this->blocks[0])) {
        this->governor = &offload->second;
        do_request(this);
        server_wake(&offload->server); /* which purges the second heap */
        return;
    }
    serve(offload, this);
    offload_report_misuse(offload);
}

static void offload_put_blocks(struct backend *backend, uint32_t class, void *const *blocks, size_t count) {
    struct request this = request_for(REQUEST_PUT, backend->governor, class, blocks, count);
    offload_put(offload_of(backend), &this);
}

/* ---- large blocks ---- */

static void *offload_take_large(struct backend *backend, size_t pages, size_t align_pages, bool zeroed,
                                bool *zero) {
    void *block = NULL;
    struct request this = request_for(REQUEST_TAKE, backend->governor, 0, &block, 1);
    this.pages = pages;
    this.align_pages = align_pages;
    this.zeroed = zeroed;
    offload_take(offload_of(backend), &this);
    *zero = this.zero;
    return block;
}

static void offload_put_large(struct backend *backend, void *block) {
    struct offload *offload = offload_of(backend);
    struct request this = request_for(REQUEST_PUT, backend->governor, 0, &block, 1);
    const struct span *span = heap_large_span(&backend->governor->heap, block);
    if (span != NULL) {
        this.bytes = (size_t)span->pages << backend->governor->heap.space.page_shift;
    } else if (!is_second(offload, block)) { /* misuse: the server finds out what kind */
        run_at_heap(offload, REQUEST_RUN, do_request, &this);
        offload_report_misuse(offload);
        return;
    }
    offload_put(offload, &this);
}

static void resize(void *subject) {
    struct request *this = subject;
    struct span *span = heap_large_span(&this->governor->heap, this->blocks[0]);
    this->blocks[0] = span == NULL ? NULL : governor_resize_large(this->governor, span, this->pages);
}

static void *offload_resize_large(struct backend *backend, void *block, size_t pages) {
    struct offload *offload = offload_of(backend);
    struct request this = {.blocks = &block, .pages = pages, .governor = backend->governor};
    if (!is_second(offload, block)) {
        return run_at_heap(offload, REQUEST_RUN, resize, &this) ? block : NULL;
    }
    this.governor = &offload->second;
    resize(&this);
    return block;
}

static struct heap *offload_heap_of(struct backend *backend, const void *block) {
    struct heap *heap = &backend->governor->heap;
    if (space_page(&heap->space, block) != 0) {
        return heap;
    }
    struct offload *offload = offload_of(backend);
    return is_second(offload, block) ? &offload->second.heap : NULL;
}

/* ---- both heaps ---- */

struct both {
    struct offload *offload;
    heap_work *work;
    void *subject;
};

/* After all that was sent to the server. In shared mode nothing is there to serve. */
static void run_on_first(void *subject) {
    const struct both *this = subject;
    struct governor *governor = this->offload->backend.governor;
    if (governor->exclusive) {
        server_serve(&this->offload->server);
    }
    this->work(governor, this->subject);
}

static bool offload_run(struct backend *backend, heap_work *work, void *subject) {
    struct offload *offload = offload_of(backend);
    struct both both = {offload, work, subject};
    bool done = run_at_heap(offload, REQUEST_RUN_LONG, run_on_first, &both);
    struct governor *second = second_if_made(offload);
    if (second != NULL) {
        work(second, subject);
    }
    offload_report_misuse(offload);
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

static size_t offload_trim(struct backend *backend, size_t keep_bytes) {
    struct trim this = {keep_bytes, 0};
    offload_run(backend, trim_one, &this);
    return this.purged_bytes;
}

static size_t offload_trim_by_helper(struct backend *backend, size_t keep_bytes) {
    size_t purged = governor_trim_by_helper(backend->governor, keep_bytes);
    struct governor *second = second_if_made(offload_of(backend));
    return purged + (second == NULL ? 0 : governor_trim_by_helper(second, 0));
}

/* ---- what the server does on the heap ---- */

static struct governor *governor_of(const void *context) {
    return ((const struct offload *)context)->backend.governor;
}

static void serve_take(void *context, struct request *request, bool at_once) {
    take_from(governor_of(context), request, !at_once);
}

static void serve_put(void *context, uint32_t class, void *const *blocks, size_t count) {
    put_into(governor_of(context), class, blocks, count);
}

static uint32_t offload_class_of(void *context, const void *block) {
    const struct space *space = &governor_of(context)->heap.space;
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

static void set_shared(void *context, enum governor_mode mode) {
    governor_set_mode(governor_of(context), mode);
}

static void set_exclusive(void *context) {
    governor_set_mode(governor_of(context), MODE_EXCLUSIVE);
}

static void between_slices(void *context) {
    server_serve_between(&((struct offload *)context)->server);
}

static size_t cached(const void *context, size_t *bytes) {
    return prefill_blocks(&((const struct offload *)context)->server, bytes);
}

static void offload_flush(void *context) {
    prefill_withdraw_all(&((struct offload *)context)->server);
}

/* ---- the server's thread ---- */

bool offload_is_possible(struct offload *offload) {
    struct cpu_set *allowed = &offload->survey.view.allowed;
    if (!cpu_affinity(0, allowed)) {
        return false;
    }
    const char *obstacle = affinity_obstacle(allowed, cgroup_cpu_quota(""));
    if (obstacle != NULL) {
        offload_print(obstacle);
    }
    return obstacle == NULL;
}

/* On the server, when it starts and when it takes the heap back. */
static void choose_cpu(void *context) {
    static const char *const messages[] = {
        [AFFINITY_NUMBER] = "offload names a CPU that the process may not run on: choosing another",
        [AFFINITY_SIBLING] = "offload=sibling, but there is no free hyperthread of that core: choosing a CPU",
        [AFFINITY_CORE] = "offload=core, but there is no other core of that socket: choosing a CPU",
        [AFFINITY_SOCKET] = "offload=socket, but there is no other socket: choosing a CPU",
    };
    struct offload *offload = context;
    /* Differs for processes that start together, also where each is the first of its container: the end of
     * the address space is randomized. */
    uint64_t seed = (uint64_t)os_syscall(SYS_getpid) * RANDOM_GOLDEN_RATIO ^ lock_self();
    affinity_update(&offload->survey, TOPOLOGY_MACHINE, (int)os_syscall(SYS_gettid));
    struct affinity_choice choice = affinity_choose(&offload->survey.view, offload->options.cpu, seed);
    enum affinity_kind kind = offload->options.cpu.kind;
    if (!offload->reported && choice.cpu >= 0 && !choice.met) {
        offload->reported = true;
        offload_print(messages[kind]);
    }
    thread_leave_files(); /* so that its files in /proc and /sys are not the program's; it prints no more */
    offload->server.always_exclusive = kind == AFFINITY_NUMBER && choice.met;
    if (choice.cpu >= 0) {
        cpu_pin((unsigned)choice.cpu);
    }
}

static void report_unresponsive(void *context) {
    (void)context;
    offload_print("the offload server does not answer: serving without it");
}

/* ---- start, fork and end ---- */

static void offload_add_counters(const struct backend *backend, struct calm_stats *stats) {
    const struct server *server = &((const struct offload *)(const void *)backend)->server;
    struct endpoint_sums clients = client_counts(server);
    size_t bytes;
    stats->cached_limit += prefill_max_blocks(server, &bytes) * vm_page_size() + bytes;
    stats->offload_hits = clients.hits;
    stats->offload_misses = clients.misses;
}

/* Whether the caller interrupted itself within a heap. */
static bool holds_heap(const struct offload *offload) {
    const struct governor *second = second_if_made(offload);
    return governor_is_held(offload->backend.governor) || (second != NULL && governor_is_held(second));
}

static enum interrupted offload_interrupted(const struct backend *backend) {
    const struct offload *offload = (const struct offload *)(const void *)backend;
    return holds_heap(offload) || server_is_held(&offload->server) ? INTERRUPTED_HOLDER
           : server_interrupts_client(&offload->server)            ? INTERRUPTED_CLIENT
                                                                   : INTERRUPTED_NOTHING;
}

static void offload_before_fork(struct backend *backend) {
    struct offload *offload = offload_of(backend);
    /* The server would wait for a thread that a signal handler interrupted within a heap, to fork. */
    server_before_fork(&offload->server, holds_heap(offload));
    lock_acquire_for_fork(&offload->second_lock, true);
    if (second_if_made(offload) != NULL) {
        governor_before_fork(&offload->second);
    }
    governor_before_fork(backend->governor);
}

static void offload_after_fork(struct backend *backend, bool child) {
    struct offload *offload = offload_of(backend);
    governor_after_fork(backend->governor, child);
    if (second_if_made(offload) != NULL) {
        governor_after_fork(&offload->second, child);
    }
    lock_release_after_fork(&offload->second_lock);
    server_after_fork(&offload->server, child);
}

static bool offload_stop_threads(struct backend *backend, uint64_t timeout_ns) {
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

static void offload_end(struct backend *backend) {
    struct offload *offload = offload_of(backend);
    if (server_stop(&offload->server, server_long_timeout_ns(&offload->server))) {
        offload_report_misuse(offload);
    }
    governor_end(backend->governor);
}

static const struct backend_functions offload_functions = {
    .take_blocks = offload_take_blocks,
    .put_blocks = offload_put_blocks,
    .take_large = offload_take_large,
    .put_large = offload_put_large,
    .resize_large = offload_resize_large,
    .heap_of = offload_heap_of,
    .run = offload_run,
    .trim = offload_trim,
    .trim_by_helper = offload_trim_by_helper,
    .add_counters = offload_add_counters,
    .interrupted = offload_interrupted,
    .before_fork = offload_before_fork,
    .after_fork = offload_after_fork,
    .stop_threads = offload_stop_threads,
    .end = offload_end,
};

struct backend *offload_open(struct offload *offload, const struct offload_options *options,
                             struct governor *governor) {
    offload->backend = (struct backend){&offload_functions, governor, true};
    offload->options = *options;
    lock_set_rank(&offload->second_lock, LOCK_SECOND_HEAP);
    struct server *server = &offload->server;
    server->hooks = (struct server_hooks){
        .context = offload,
        .take = serve_take,
        .put = serve_put,
        .class_of = offload_class_of,
        .tick = tick,
        .switch_to_shared = set_shared,
        .switch_to_exclusive = set_exclusive,
        .choose_cpu = choose_cpu,
        .report_unresponsive = report_unresponsive,
    };
    server->layout.classes = governor->heap.classes;
    server->timeout_ns = (uint64_t)options->timeout_ms * 1000000U;
    server->contention.cpus = cpu_set_count(&offload->survey.view.allowed);
    offload->heap_ops = (struct heap_ops){offload, between_slices, cached, offload_flush};
    governor->ops = &offload->heap_ops;
    return server_init(server, governor->caches->count, CLIENT_CACHE_CLASS_BYTES) ? &offload->backend : NULL;
}
