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

/* What a server makes resident while its caller waits, about a quarter of a millisecond's work. */
#define MAX_POPULATED_BYTES ((size_t)1 << 20)

struct offload calm_offload;

static struct offload *offload_of(struct backend *backend) {
    return (struct offload *)(void *)backend;
}

static void print(const char *message) {
    text_write_line(2, "calmalloc: %s", message);
}

/* ---- the second heap ---- */

static struct governor *second_if_made(const struct offload *offload) {
    bool made = atomic_load_explicit(&offload->second_made, memory_order_acquire) > 0;
    return made ? (struct governor *)(uintptr_t)&offload->second : NULL;
}

static void copy_setting(_Atomic(int) *to, const _Atomic(int) *from) {
    atomic_store_explicit(to, atomic_load_explicit(from, memory_order_relaxed), memory_order_relaxed);
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
    return cpu_cache_number(offload->backend.governor->caches);
}

/* Has the server do what `ask` asks for, or does work(subject) itself while the heap is in shared mode. If
 * the server has the heap back by then, it is asked again. False if it does not answer. */
static bool serve(struct offload *offload, enum answer (*ask)(struct offload *offload, void *subject),
                  void (*work)(void *subject), void *subject) {
    for (;;) {
        enum answer answer = ask(offload, subject);
        if (answer != ANSWER_SHARED) {
            return answer == ANSWER_DONE;
        }
        struct endpoint *endpoint = client_enter_shared(&offload->server, cpu_number(offload));
        if (endpoint != NULL) {
            work(subject);
            client_leave_shared(endpoint);
            return true;
        }
    }
}

struct task {
    enum call_kind kind;
    void (*work)(void *subject);
    void *subject;
};

static enum answer ask_task(struct offload *offload, void *subject) {
    const struct task *this = subject;
    return client_run(&offload->server, cpu_number(offload), this->kind, this->work, this->subject);
}

static void run_task(void *subject) {
    const struct task *this = subject;
    this->work(this->subject);
}

/* Has work(subject) run by the server, or runs it in shared mode. False if the server does not answer. */
static bool run_at_heap(struct offload *offload, enum call_kind kind, void (*work)(void *subject),
                        void *subject) {
    struct task task = {kind, work, subject};
    return serve(offload, ask_task, run_task, &task);
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

/* Blocks of a class, or one large block: which heap's, and what is asked for or given. */
struct request {
    struct governor *governor;
    uint32_t class;
    void **blocks;
    size_t count;
    void *block;
    size_t pages;
    size_t align_pages;
    bool zeroed;
    bool zero;
    bool populates; /* by the caller, once it has left the heap */
};

static void work_take(void *subject) {
    struct request *this = subject;
    this->count = governor_take_blocks(this->governor, this->class, this->blocks, this->count);
}

static enum answer ask_take(struct offload *offload, void *subject) {
    struct request *this = subject;
    struct server *server = &offload->server;
    size_t got;
    enum answer answer;
    if (offload->options.sync) {
        answer = client_take_sync(server, this->class, this->blocks);
        got = this->blocks[0] != NULL;
    } else {
        answer = client_take(server, cpu_number(offload), this->class, this->blocks, this->count, &got);
    }
    this->count = answer == ANSWER_DONE ? got : this->count;
    return answer;
}

/* As take_large: either heap may have memory where the other has none. */
static struct taken take_blocks(struct backend *backend, uint32_t class, void **blocks, size_t count) {
    struct offload *offload = offload_of(backend);
    struct request this = {.governor = backend->governor, .class = class, .blocks = blocks, .count = count};
    report_misuse(offload);
    bool served = serve(offload, ask_take, work_take, &this);
    report_misuse(offload);
    if (served && (this.count > 0 || second_if_made(offload) == NULL)) {
        return (struct taken){this.count, true};
    }
    struct governor *second = second_heap(offload);
    size_t got = second == NULL ? 0 : governor_take_blocks(second, class, blocks, 1);
    if (got > 0 || served || !run_at_heap(offload, CALL_LONG, work_take, &this)) {
        return (struct taken){got, false};
    }
    return (struct taken){this.count, true};
}

/* Returns blocks to the heap that has them. */
static void put(struct offload *offload, enum answer (*ask)(struct offload *offload, void *subject),
                void (*work)(void *subject), struct request *this, const void *block) {
    report_misuse(offload);
    if (is_second(offload, block)) {
        this->governor = &offload->second;
        work(this);
        server_wake(&offload->server); /* which purges the second heap */
        return;
    }
    serve(offload, ask, work, this);
    report_misuse(offload);
}

static void work_put(void *subject) {
    const struct request *this = subject;
    governor_put_blocks(this->governor, this->class, this->blocks, this->count);
}

static enum answer ask_put(struct offload *offload, void *subject) {
    const struct request *this = subject;
    struct server *server = &offload->server;
    if (offload->options.sync && this->count == 1) {
        enum answer answer = client_put_sync(server, this->class, this->blocks[0]);
        if (answer != ANSWER_UNRESPONSIVE) {
            return answer;
        }
    }
    bool sent = client_put(server, cpu_number(offload), this->class, this->blocks, this->count);
    return sent ? ANSWER_DONE : ANSWER_SHARED;
}

static void put_blocks(struct backend *backend, uint32_t class, void *const *blocks, size_t count) {
    struct request this = {backend->governor, class, (void **)(uintptr_t)blocks, .count = count};
    put(offload_of(backend), ask_put, work_put, &this, blocks[0]);
}

/* ---- large blocks ---- */

static void plan_populate(void *subject) {
    struct request *this = subject;
    this->populates = governor_may_populate(this->governor, this->block, this->pages);
}

static void work_take_large(void *subject) {
    struct request *this = subject;
    this->block = governor_take_large(this->governor, this->pages, this->align_pages, &this->zero);
    if (this->block != NULL && this->zeroed && this->zero) {
        plan_populate(this);
    }
}

/* Whether the server makes so large a block resident for a calloc; else its caller does, since no other
 * client is served meanwhile. */
static bool server_populates(size_t pages) {
    return pages * vm_page_size() <= MAX_POPULATED_BYTES;
}

static enum answer ask_take_large(struct offload *offload, void *subject) {
    struct request *this = subject;
    enum answer answer =
        client_take_large(&offload->server, cpu_number(offload), this->pages, this->align_pages,
                          this->zeroed ? TAKE_ZEROED : 0, &this->block, &this->zero);
    if (answer == ANSWER_DONE && this->block != NULL && this->zeroed && this->zero &&
        !server_populates(this->pages)) {
        run_at_heap(offload, CALL_SHORT, plan_populate, this);
    }
    return answer;
}

/* Each heap may have room where the other has none: the second one is asked first while the server does not
 * answer, and then a longer wait for the server is worth it. */
static void *take_large(struct backend *backend, size_t pages, size_t align_pages, bool zeroed, bool *zero) {
    struct offload *offload = offload_of(backend);
    struct request this = {backend->governor, .pages = pages, .align_pages = align_pages, .zeroed = zeroed};
    report_misuse(offload);
    bool served = serve(offload, ask_take_large, work_take_large, &this);
    struct governor *second = served ? second_if_made(offload) : second_heap(offload);
    if (this.block == NULL && second != NULL) {
        this.governor = second;
        work_take_large(&this);
    }
    if (this.block == NULL && !served) {
        this.governor = backend->governor;
        run_at_heap(offload, CALL_LONG, work_take_large, &this);
    }
    if (this.populates) {
        governor_populate(this.governor, this.block, pages);
    }
    *zero = this.zero;
    return this.block;
}

static void work_put_large(void *subject) {
    const struct request *this = subject;
    governor_put_large(this->governor, this->block);
}

static enum answer ask_put_large(struct offload *offload, void *subject) {
    struct request *this = subject;
    struct server *server = &offload->server;
    const struct span *span = heap_large_span(&this->governor->heap, this->block);
    if (span == NULL) { /* misuse: the server finds out what kind */
        return client_run(server, cpu_number(offload), CALL_SHORT, work_put_large, this);
    }
    size_t bytes = (size_t)span->pages << this->governor->heap.space.page_shift;
    bool sent = client_put_large(server, cpu_number(offload), this->block, bytes);
    return sent ? ANSWER_DONE : ANSWER_SHARED;
}

static void put_large(struct backend *backend, void *block) {
    struct request this = {.governor = backend->governor, .block = block};
    put(offload_of(backend), ask_put_large, work_put_large, &this, block);
}

static void resize(void *subject) {
    struct request *this = subject;
    struct span *span = heap_large_span(&this->governor->heap, this->block);
    this->block = span == NULL ? NULL : governor_resize_large(this->governor, span, this->pages);
}

static void *resize_large(struct backend *backend, void *block, size_t pages) {
    struct offload *offload = offload_of(backend);
    struct request this = {.governor = backend->governor, .block = block, .pages = pages};
    if (!is_second(offload, block)) {
        return run_at_heap(offload, CALL_SHORT, resize, &this) ? this.block : NULL;
    }
    this.governor = &offload->second;
    resize(&this);
    return this.block;
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

struct both {
    struct offload *offload;
    void (*work)(struct governor *governor, void *subject);
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

static bool run(struct backend *backend, void (*work)(struct governor *governor, void *subject),
                void *subject) {
    struct offload *offload = offload_of(backend);
    struct both both = {offload, work, subject};
    bool done = run_at_heap(offload, CALL_LONG, run_on_first, &both);
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
    size_t purged = governor_trim_by_helper(backend->governor, keep_bytes);
    struct governor *second = second_if_made(offload_of(backend));
    return purged + (second == NULL ? 0 : governor_trim_by_helper(second, 0));
}

/* ---- what the server does on the heap ---- */

static struct governor *governor_of(const void *context) {
    return ((const struct offload *)context)->backend.governor;
}

static size_t serve_take(void *context, uint32_t class, void **blocks, size_t count, unsigned flags) {
    return governor_take_blocks_exclusive(governor_of(context), class, blocks, count,
                                          (flags & TAKE_AT_ONCE) == 0);
}

static void serve_put(void *context, uint32_t class, void *const *blocks, size_t count) {
    governor_put_blocks(governor_of(context), class, blocks, count);
}

static void *serve_take_large(void *context, size_t pages, size_t align_pages, unsigned flags, bool *zero) {
    struct governor *governor = governor_of(context);
    void *block =
        governor_take_large_exclusive(governor, pages, align_pages, zero, (flags & TAKE_AT_ONCE) == 0);
    if (block != NULL && *zero && (flags & TAKE_ZEROED) != 0 && server_populates(pages) &&
        governor_may_populate(governor, block, pages)) {
        governor_populate(governor, block, pages);
    }
    return block;
}

static void serve_put_large(void *context, void *block) {
    governor_put_large(governor_of(context), block);
}

static uint32_t class_of(void *context, const void *block) {
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

static void set_shared(void *context, enum sharing sharing) {
    static const enum shared_mode modes[] = {[SHARING_FOR_NOW] = SHARED_BACKGROUND,
                                             [SHARING_UNTIL_START] = SHARED_FOREGROUND,
                                             [SHARING_FOR_GOOD] = SHARED_FOR_GOOD};
    governor_set_shared(governor_of(context), modes[sharing]);
}

static void set_exclusive(void *context) {
    struct offload *offload = context;
    governor_set_exclusive(offload->backend.governor, &offload->heap_ops);
}

static void between_slices(void *context) {
    server_serve_between(&((struct offload *)context)->server);
}

static size_t cached(const void *context, size_t *bytes) {
    return prefill_blocks(&((const struct offload *)context)->server, bytes);
}

static void flush(void *context) {
    prefill_withdraw_all(&((struct offload *)context)->server);
}

/* ---- the server's thread ---- */

bool offload_is_possible(struct offload *offload) {
    static const char *const messages[] = {
        [AFFINITY_DECLINE_ONE_CPU] =
            "offload needs a CPU of its own, and there is but one: running without it",
        [AFFINITY_DECLINE_QUOTA] = "offload needs a CPU of its own, and the control group may use less than "
                                   "two: running without it",
    };
    struct cpu_set *allowed = &offload->survey.view.allowed;
    if (!cpu_affinity(0, allowed)) {
        return false;
    }
    enum affinity_decline decline = affinity_should_decline(allowed, cgroup_cpu_quota());
    if (decline != AFFINITY_NO_DECLINE) {
        print(messages[decline]);
    }
    return decline == AFFINITY_NO_DECLINE;
}

/* On the server, when it starts and when it takes the heap back. */
static void choose_cpu(void *context) {
    static const char *const messages[] = {
        [AFFINITY_NOT_ALLOWED] = "offload names a CPU that the process may not run on: choosing another",
        [AFFINITY_NO_SIBLING] =
            "offload=sibling, but there is no free hyperthread of that core: choosing a CPU",
        [AFFINITY_NO_CORE] = "offload=core, but there is no other core of that socket: choosing a CPU",
        [AFFINITY_NO_SOCKET] = "offload=socket, but there is no other socket: choosing a CPU",
    };
    struct offload *offload = context;
    /* Differs for processes that start together, also where each is the first of its container: the end of
     * the address space is randomized. */
    uint64_t seed = (uint64_t)os_syscall(SYS_getpid) * RANDOM_GOLDEN_RATIO ^ lock_self();
    affinity_update(&offload->survey, TOPOLOGY_MACHINE, (int)os_syscall(SYS_gettid), MAX_CPUS);
    struct affinity_choice choice = affinity_choose(&offload->survey.view, offload->options.cpu, seed);
    if (!offload->reported && choice.reason != AFFINITY_MET && choice.reason != AFFINITY_ONE_CPU) {
        offload->reported = true;
        print(messages[choice.reason]);
    }
    thread_leave_files(); /* so that its files in /proc and /sys are not the program's; it prints no more */
    offload->server.always_exclusive =
        offload->options.cpu.kind == AFFINITY_NUMBER && choice.reason == AFFINITY_MET;
    if (choice.cpu >= 0) {
        cpu_pin((unsigned)choice.cpu);
    }
}

static void report_unresponsive(void *context) {
    (void)context;
    print("the offload server does not answer: serving without it");
}

/* ---- start, fork and end ---- */

static void add_counters(const struct backend *backend, struct calm_stats *stats) {
    const struct server *server = &((const struct offload *)(const void *)backend)->server;
    struct endpoint_sums clients = client_counts(server);
    size_t bytes;
    stats->cached_limit += prefill_max_blocks(server, &bytes) * vm_page_size() + bytes;
    stats->offload_hits = clients.hits;
    stats->offload_misses = clients.misses;
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
    if (server_stop(&offload->server, server_long_timeout_ns(&offload->server))) {
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
    server->hooks = (struct server_hooks){
        .context = offload,
        .classes = &governor->heap.classes[0],
        .take = serve_take,
        .put = serve_put,
        .take_large = serve_take_large,
        .put_large = serve_put_large,
        .class_of = class_of,
        .tick = tick,
        .switch_to_shared = set_shared,
        .switch_to_exclusive = set_exclusive,
        .choose_cpu = choose_cpu,
        .report_unresponsive = report_unresponsive,
        .page_size = vm_page_size(),
    };
    server->timeout_ns = (uint64_t)options->timeout_ms * 1000000U;
    server->contention.cpus = cpu_set_count(&offload->survey.view.allowed);
    offload->heap_ops = (struct heap_ops){offload, between_slices, cached, flush};
    return server_init(server, governor->caches->count, CLIENT_CACHE_CLASS_BYTES) ? &offload->backend : NULL;
}
