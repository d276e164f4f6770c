#include "api/offloading.h"

#include "api/allocator.h"
#include "api/door.h"
#include "api/misuse.h"
#include "api/options.h"
#include "api/requests.h"
#include "offload/place.h"
#include "offload/stock.h"
#include "os/cgroup.h"
#include "os/lock.h"
#include "os/syscall.h"
#include "os/text.h"
#include "os/thread.h"

/* What a server makes resident while its caller waits, about a quarter of a millisecond's. */
#define POPULATED_MOST ((size_t)1 << 20)

struct server calm_server;

static enum offloading mode;
static struct governor_owner owner;

static struct governor second;
static struct cpu_caches no_caches;
static struct lock second_lock;
static _Atomic(int) second_made; /* -1: there is no memory for it */

/* The server's own, once it runs. */
static struct place_survey survey;
static bool told;

static void say(const char *why) {
    struct text line = {0};
    text_string(&line, "calmalloc: ");
    text_string(&line, why);
    text_string(&line, "\n");
    text_write(&line, 2);
}

enum offloading offloading_choose(void) {
    mode = OFFLOADING_NONE;
    if (options_offload() == OPTION_OFFLOAD_OFF) {
        return mode;
    }
    if (!cpu_affinity(0, &survey.view.allowed)) {
        return mode;
    }
    switch (place_should_decline(&survey.view.allowed, cgroup_cpu_quota())) {
    case PLACE_DECLINE_ONE_CPU:
        say("offload needs a CPU of its own, and there is but one: running without it");
        return mode;
    case PLACE_DECLINE_QUOTA:
        say("offload needs a CPU of its own, and the control group may use less than two: running without "
            "it");
        return mode;
    case PLACE_NO_DECLINE:
        break;
    }
    mode = options_offload() == OPTION_OFFLOAD_SYNC ? OFFLOADING_SYNC : OFFLOADING_ON;
    return mode;
}

enum offloading offloading_mode(void) {
    return mode;
}

/* What the server does on the heap. */

static size_t take(void *context, uint32_t class, void **blocks, size_t count, unsigned flags) {
    return governor_take_blocks_ready(context, class, blocks, count, (flags & TAKE_AT_ONCE) == 0);
}

static void put(void *context, uint32_t class, void *const *blocks, size_t count) {
    governor_put_blocks(context, class, blocks, count);
}

bool offloading_populates(size_t pages) {
    return pages * os_page_size() <= POPULATED_MOST;
}

static void *take_large(void *context, size_t pages, size_t align_pages, unsigned flags, bool *zero) {
    void *block = governor_take_large_ready(context, pages, align_pages, zero, (flags & TAKE_AT_ONCE) == 0);
    if (block != NULL && *zero && (flags & TAKE_ZEROED) != 0 && offloading_populates(pages) &&
        governor_may_populate(context, block, pages)) {
        governor_populate(context, block, pages);
    }
    return block;
}

static void put_large(void *context, void *block) {
    governor_put_large(context, block);
}

static uint32_t class_of(void *context, const void *block) {
    const struct space *space = &((const struct governor *)context)->heap.space;
    uint32_t page = space_page(space, block);
    return page == 0 ? 0 : space->class_of[page];
}

static size_t trim_by_server(size_t keep_bytes) {
    struct governor *other = offloading_second_if_made();
    size_t given = other == NULL ? 0 : governor_trim_by_helper(other, 0);
    return given + governor_trim_by_helper(&calm_governor, keep_bytes);
}

/* Of both heaps: the second one has no helper. */
static bool tick(void *context) {
    requests_notice(trim_by_server);
    struct governor *other = offloading_second_if_made();
    bool idle = other == NULL || governor_tick(other, true);
    return governor_tick(context, true) && idle;
}

static void lend(void *context, enum lending lending) {
    static const enum lent lent[] = {
        [LEND_TENDED] = LENT_TENDED, [LEND_UNTENDED] = LENT_UNTENDED, [LEND_FOR_GOOD] = LENT_FOR_GOOD};
    governor_lend(context, lent[lending]);
}

static void take_back(void *context) {
    governor_own(context, &owner);
}

static void between(void *context) {
    server_serve_between(context);
}

static size_t cached(const void *context, size_t *bytes) {
    return stock_blocks(context, bytes);
}

static void shed(void *context) {
    stock_withdraw_all(context);
}

static struct place_request request(void) {
    int cpu = options_offload_cpu();
    switch (cpu) {
    case OPTION_OFFLOAD_CPU_AUTO:
        return (struct place_request){PLACE_AUTO, 0};
    case OPTION_OFFLOAD_CPU_SIBLING:
        return (struct place_request){PLACE_SIBLING, 0};
    case OPTION_OFFLOAD_CPU_CORE:
        return (struct place_request){PLACE_CORE, 0};
    case OPTION_OFFLOAD_CPU_SOCKET:
        return (struct place_request){PLACE_SOCKET, 0};
    default:
        return (struct place_request){PLACE_NUMBER, (unsigned)(cpu - OPTION_OFFLOAD_CPU_FIRST)};
    }
}

static void tell(enum place_reason reason) {
    static const char *const why[] = {
        [PLACE_NOT_ALLOWED] = "offload_cpu is not a CPU that the process may run on: choosing one",
        [PLACE_NO_SIBLING] =
            "offload_cpu=sibling, but there is no free hyperthread of that core: choosing a CPU",
        [PLACE_NO_CORE] = "offload_cpu=core, but there is no other core of that socket: choosing a CPU",
        [PLACE_NO_SOCKET] = "offload_cpu=socket, but there is no other socket: choosing a CPU",
    };
    if (!told && reason != PLACE_MET && reason != PLACE_ONE_CPU) {
        told = true;
        say(why[reason]);
    }
}

/* Processes that start together choose differently, also where each is the first of its container: the end of
 * the address space is another for each. */
static uint64_t seed(void) {
    return (uint64_t)os_syscall(SYS_getpid, 0, 0, 0, 0, 0, 0) * 0x9e3779b97f4a7c15ULL ^
           (uint64_t)(uintptr_t)thread_pointer();
}

static void settle(void) {
    int self = (int)os_syscall(SYS_gettid, 0, 0, 0, 0, 0, 0);
    place_look(&survey, TOPOLOGY_MACHINE, self, CPUS_MOST);
    struct place_request wanted = request();
    struct place_choice choice = place_choose(&survey.view, wanted, seed());
    tell(choice.reason);
    thread_leave_files(); /* its own, of /proc and /sys, are to be in nobody's way; it says nothing any more
                           */
    calm_server.keeps = wanted.kind == PLACE_NUMBER && choice.reason == PLACE_MET;
    if (choice.cpu >= 0) {
        cpu_pin((unsigned)choice.cpu);
    }
}

static void lost(void) {
    say("the offload server does not answer: serving without it");
}

bool offloading_prepare(void) {
    calm_server.owner = (struct owner){
        .context = &calm_governor,
        .classes = &calm_governor.heap.classes[0],
        .take = take,
        .put = put,
        .take_large = take_large,
        .put_large = put_large,
        .class_of = class_of,
        .tick = tick,
        .lend = lend,
        .take_back = take_back,
        .page_size = os_page_size(),
    };
    calm_server.patience_ns = (uint64_t)options_offload_patience() * 1000000U;
    calm_server.settle = settle;
    calm_server.lost = lost;
    calm_server.crowd.cpus = cpu_set_count(&survey.view.allowed);
    if (!server_init(&calm_server, calm_caches.count, SPARE_CLASS_BYTES)) {
        mode = OFFLOADING_NONE;
        return false;
    }
    owner = (struct governor_owner){&calm_server, between, cached, shed};
    return true;
}

/* The second heap. */

struct governor *offloading_second_if_made(void) {
    return atomic_load_explicit(&second_made, memory_order_acquire) > 0 ? &second : NULL;
}

struct governor *offloading_second(void) {
    if (atomic_load_explicit(&second_made, memory_order_acquire) == 0) {
        lock_acquire(&second_lock);
        if (atomic_load_explicit(&second_made, memory_order_relaxed) == 0) {
            /* As the first one; the server tidies it, too. */
            second.purger_may_stop = true; /* the server, by a debugger: that is when this heap is wanted */
            atomic_store_explicit(&second.settings.policy, calm_governor.settings.policy,
                                  memory_order_relaxed);
            atomic_store_explicit(&second.settings.slack, calm_governor.settings.slack, memory_order_relaxed);
            atomic_store_explicit(&second.settings.purge_time, calm_governor.settings.purge_time,
                                  memory_order_relaxed);
            bool made = governor_init(&second, calm_governor.heap.classes, &no_caches, ALLOCATOR_SPACE_BYTES,
                                      false, misuse_report);
            atomic_store_explicit(&second_made, made ? 1 : -1, memory_order_release);
        }
        lock_release(&second_lock);
    }
    return offloading_second_if_made();
}

static bool is_a_heap_held(void) {
    const struct governor *other = offloading_second_if_made();
    return governor_is_held(&calm_governor) || (other != NULL && governor_is_held(other));
}

bool offloading_is_held(void) {
    return is_a_heap_held() || (mode != OFFLOADING_NONE && server_is_held(&calm_server));
}

bool offloading_interrupts_client(void) {
    return is_a_heap_held() || (mode != OFFLOADING_NONE && server_interrupts_client(&calm_server));
}

void offloading_before_fork(void) {
    if (mode == OFFLOADING_NONE) {
        return;
    }
    /* The server would wait for a thread that a signal handler interrupted within a heap, to fork. */
    server_before_fork(&calm_server, is_a_heap_held());
    lock_acquire_for_fork(&second_lock, true);
    if (offloading_second_if_made() != NULL) {
        governor_before_fork(&second);
    }
}

void offloading_after_fork(bool child) {
    if (mode == OFFLOADING_NONE) {
        return;
    }
    if (offloading_second_if_made() != NULL) {
        governor_after_fork(&second, child);
    }
    lock_release_after_fork(&second_lock);
    server_after_fork(&calm_server, child);
}

void offloading_retire(uint64_t patience_ns) {
    bool started = atomic_load_explicit(&calm_server.thread, memory_order_seq_cst) == THREAD_STARTED;
    if (mode != OFFLOADING_NONE && started && server_stop(&calm_server, patience_ns)) {
        while (!thread_is_gone(&calm_server.worker)) {
            thread_wait(&calm_server.worker, 0);
        }
    }
    thread_wait_uncounted(&calm_server.worker, patience_ns);
}

void offloading_end(void) {
    if (mode != OFFLOADING_NONE && server_stop(&calm_server, PATIENCES * calm_server.patience_ns)) {
        door_report_misuse();
    }
}
