#include "offload/server.h"

#include "offload/spare.h"
#include "offload/stock.h"
#include "os/address_space.h"
#include "os/clock.h"
#include "os/filters.h"
#include "os/futex.h"
#include "os/syscall.h"
#include "os/thread.h"

#include <string.h>

#define STACK_BYTES ((size_t)128 << 10)
/* Without work it looks around for so long before it naps. */
#define HOT_NS 1000000ULL
/* The first nap; up to so long a one it comes round soon enough by itself for who has taken the last that was
 * ready. */
#define NAP_NS_LEAST 50000ULL
#define NAP_NS_SHORT 1000000ULL
#define NAP_NS_MOST  100000000ULL
/* A window of the predictor. */
#define WINDOW_NS 100000000ULL
/* A fork tries so often to enter what a server that does not answer may be in. */
#define FORK_TRIES 1000
/* Passes between two looks at the clock while there is work. */
#define PASSES_PER_CLOCK 64
/* Of the overflow: 8 MiB, or less where address space is limited. */
#define OVERFLOW_BLOCKS_MOST ((size_t)1 << 20)
#define OVERFLOW_SHARE       64
enum stopping { STOPPING_NOT, STOPPING, STOPPED };

enum parking { PARKING_NONE, PARKING_REQUESTED, PARKING_PARKED };

static uint32_t load(const _Atomic(uint32_t) *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

bool server_open(struct server *server, unsigned number) {
    lock_acquire(&server->open_lock);
    bool open = atomic_load_explicit(&server->is_open[number], memory_order_relaxed);
    if (!open && os_commit(server_endpoint(server, number), server->endpoint_bytes)) {
        uint32_t opened = atomic_load_explicit(&server->opened, memory_order_relaxed);
        atomic_store_explicit(&server->open[opened], (uint16_t)number, memory_order_relaxed);
        atomic_store_explicit(&server->opened, opened + 1, memory_order_seq_cst);
        atomic_store_explicit(&server->is_open[number], true, memory_order_release);
        open = true;
    }
    lock_release(&server->open_lock);
    return open;
}

/* A share of the address space that the process may have. */
static size_t overflow_blocks_most(void) {
    size_t share = os_address_space_limit() / OVERFLOW_SHARE / sizeof(void *);
    return share < OVERFLOW_BLOCKS_MOST ? share : OVERFLOW_BLOCKS_MOST;
}

bool server_init(struct server *server, unsigned endpoint_count, size_t spare_class_bytes) {
    uint32_t words = stock_prepare(server);
    words += spare_prepare(server, words, spare_class_bytes);
    size_t page = os_page_size();
    size_t bytes = sizeof(struct endpoint) + words * sizeof(uint64_t);
    server->endpoint_bytes = (bytes + page - 1) & ~(page - 1);
    server->endpoint_count = endpoint_count;
    size_t lists = endpoint_count * (sizeof *server->open + sizeof *server->is_open);
    lists = (lists + page - 1) & ~(page - 1);
    char *memory = os_reserve(lists, page);
    if (memory == NULL || !os_commit(memory, lists)) {
        return false;
    }
    server->open = (_Atomic(uint16_t) *)(void *)memory;
    server->is_open = (_Atomic(bool) *)(void *)(memory + endpoint_count * sizeof *server->open);
    server->endpoints = os_reserve(endpoint_count * server->endpoint_bytes, page);
    server->nap_ns = NAP_NS_LEAST;
    return server->endpoints != NULL && overflow_init(&server->overflow, overflow_blocks_most()) &&
           server_open(server, 0);
}

/* Sleep. */

/* Looks once more, after it has said that it sleeps: what a client published before it saw that is seen. */
static bool is_wanted(struct server *server) {
    bool wanted = server_has_deferred(server) ||
                  atomic_load_explicit(&server->sync.ready, memory_order_seq_cst) == SYNC_REQUEST ||
                  atomic_load_explicit(&server->parking, memory_order_seq_cst) == PARKING_REQUESTED ||
                  atomic_load_explicit(&server->stopping, memory_order_seq_cst) != 0 ||
                  atomic_load_explicit(&server->starved, memory_order_seq_cst) ||
                  !overflow_is_empty(&server->overflow);
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_seq_cst);
    for (unsigned i = 0; i < opened && !wanted; i++) {
        unsigned number = atomic_load_explicit(&server->open[i], memory_order_relaxed);
        wanted = ring_filled(&server_endpoint(server, number)->ring, true) > 0;
    }
    return wanted;
}

static void sleep_for(struct server *server, uint64_t ns) {
    uint32_t rung = atomic_load_explicit(&server->bell, memory_order_seq_cst);
    atomic_store_explicit(&server->state, ns == 0 || ns > NAP_NS_SHORT ? SERVER_SLEEPS : SERVER_NAPS,
                          memory_order_seq_cst);
    if (!is_wanted(server)) {
        server_count(&server->counts.naps);
        futex_wait(&server->bell, rung, ns);
    }
    atomic_store_explicit(&server->state, SERVER_HOT, memory_order_seq_cst);
}

void server_ring(struct server *server) {
    atomic_fetch_add_explicit(&server->bell, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&server->wakes, 1, memory_order_relaxed);
    futex_wake_all(&server->bell);
}

void server_wake(struct server *server) {
    /* One of those who come at once rings, for the others too: they find it hot, as it will be. */
    uint32_t state = atomic_load_explicit(&server->state, memory_order_seq_cst);
    while (state != SERVER_HOT) {
        if (atomic_compare_exchange_weak_explicit(&server->state, &state, SERVER_HOT, memory_order_seq_cst,
                                                  memory_order_seq_cst)) {
            server_ring(server);
            return;
        }
    }
}

/* All endpoints are the caller's until leave_all: no client changes anything, or looks at the phase. */
static void enter_all(struct server *server) {
    lock_acquire(&server->open_lock);
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        endpoint_enter(server_endpoint(server, server->open[i]));
    }
    atomic_store_explicit(&server->sync.closing, true, memory_order_relaxed);
    lock_acquire(&server->sync.clients);
    atomic_store_explicit(&server->sync.closing, false, memory_order_relaxed);
}

static void leave_all(struct server *server) {
    lock_release(&server->sync.clients);
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = opened; i-- > 0;) {
        endpoint_leave(server_endpoint(server, server->open[i]));
    }
    lock_release(&server->open_lock);
}

/* All of the overflow, too, which a server else passes by while somebody pushes. */
static void serve_to_the_end(struct server *server) {
    while (server_serve(server) || !overflow_is_empty(&server->overflow)) {
        os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
    }
}

/* Whoever sent anything before the phase changes is served; whoever comes after finds the heap lent. */
static void lend(struct server *server, enum lending lending) {
    stock_withdraw_all(server);
    enter_all(server);
    server->in_all = true;
    serve_to_the_end(server);
    stock_withdraw_all(server); /* also what a call expects that came meanwhile */
    server->owner.lend(server->owner.context, lending);
    atomic_store_explicit(&server->phase, PHASE_LENT, memory_order_release);
    server->in_all = false;
    leave_all(server);
}

static void give_way(struct server *server, uint64_t now) {
    server_count(&server->counts.lent);
    crowd_give_way(&server->crowd, now);
    lend(server, LEND_TENDED);
}

/* Who comes from now on asks the server; who came before is at the heap until it is counted no more. */
static void take_back(struct server *server) {
    /* Not while another thread forks, to whose child a lent heap is whole. */
    lock_acquire(&server->open_lock);
    atomic_store_explicit(&server->phase, PHASE_RUNNING, memory_order_seq_cst);
    for (unsigned i = 0; i < server->endpoint_count; i++) {
        while (server_is_open(server, i) &&
               atomic_load_explicit(&server_endpoint(server, i)->borrowers, memory_order_seq_cst) != 0) {
            if (load(&server->parking) != PARKING_REQUESTED) {
                server_beat(server); /* a thread that forks may be the one that is waited for */
            }
            os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
        }
    }
    server->owner.take_back(server->owner.context);
    lock_release(&server->open_lock);
    server->crowd.looked_ns = 0;
}

/* While the heap is lent: tidies it, as the helper of a heap without a server does. */
static void wait_for_room(struct server *server) {
    sleep_for(server, crowd_away_ns(&server->crowd, clock_now_ns(), NAP_NS_MOST));
    /* Nothing is in the rings; but blocks may be on the overflow list. */
    server_serve(server);
    server->idle = server->owner.tick(server->owner.context);
    if (crowd_has_room(&server->crowd, clock_now_ns())) {
        server->settle(server->owner.context);
        take_back(server);
    }
}

static void look_at_window(struct server *server, uint64_t now) {
    if (now - server->window_ns < WINDOW_NS) {
        return;
    }
    server->window_ns = now;
    bool stocked = false;
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        unsigned number = atomic_load_explicit(&server->open[i], memory_order_relaxed);
        stocked |= stock_end_window(server, server_endpoint(server, number));
    }
    server->depth++; /* calls that run long work wait until this is done */
    /* Asleep for good, the server would end no later window, and an idle program would keep its stock. */
    server->idle = server->owner.tick(server->owner.context) && !stocked;
    server->depth--;
}

/* There is no work: looks around for a while, then naps, then sleeps. */
static void rest(struct server *server, uint64_t now) {
    if (server->hot_until_ns == 0) {
        server->hot_until_ns = now + HOT_NS;
    }
    if (now < server->hot_until_ns) {
        for (int i = 0; i < 4; i++) {
            cpu_relax();
        }
        return;
    }
    bool for_good = server->idle && server->nap_ns >= NAP_NS_MOST;
    uint64_t start = clock_now_ns(); /* the window's work is over */
    sleep_for(server, for_good ? 0 : server->nap_ns);
    server->crowd.slept_ns += clock_now_ns() - start;
    /* Whoever ends a sleep for good may have left something to tidy once a window is over. */
    server->nap_ns = for_good                           ? NAP_NS_LEAST
                     : server->nap_ns * 2 < NAP_NS_MOST ? server->nap_ns * 2
                                                        : NAP_NS_MOST;
}

static void park(struct server *server) {
    uint32_t requested = PARKING_REQUESTED;
    if (!atomic_compare_exchange_strong_explicit(&server->parking, &requested, PARKING_PARKED,
                                                 memory_order_seq_cst, memory_order_relaxed)) {
        return;
    }
    futex_wake_all(&server->parking);
    while (atomic_load_explicit(&server->parking, memory_order_acquire) == PARKING_PARKED) {
        futex_wait(&server->parking, PARKING_PARKED, 0);
    }
    server->crowd.looked_ns = 0;
}

/* True if it is to end. */
static bool look_at_requests(struct server *server) {
    if (load(&server->parking) == PARKING_REQUESTED) {
        park(server);
    }
    return load(&server->stopping) != 0;
}

static void run(void *argument) {
    struct server *server = argument;
    server->settle(server->owner.context);
    take_back(server);
    for (unsigned pass = 0; !look_at_requests(server); pass++) {
        if (server_is_lent(server)) {
            wait_for_room(server);
            continue;
        }
        bool worked = server_serve(server);
        worked |= stock_feed(server);
        if (worked) {
            server->hot_until_ns = 0;
            server->nap_ns = NAP_NS_LEAST;
            server->idle = false;
            if (pass % PASSES_PER_CLOCK != 0) {
                continue;
            }
        }
        uint64_t now = clock_now_ns();
        look_at_window(server, now);
        if (!server->keeps && crowd_is_there(&server->crowd, now)) {
            give_way(server, now);
        } else if (!worked) {
            rest(server, now);
        }
    }
    if (server_is_lent(server)) {
        take_back(server); /* from whoever is at it */
    }
    lend(server, LEND_FOR_GOOD);
    atomic_store_explicit(&server->thread, THREAD_REFUSED, memory_order_release);
    atomic_store_explicit(&server->stopping, STOPPED, memory_order_release);
    futex_wake_all(&server->stopping);
}

void server_begin(struct server *server) {
    lock_acquire(&server->begin_lock);
    if (atomic_load_explicit(&server->phase, memory_order_relaxed) == PHASE_NONE) {
        /* As the server that is not there: nobody else is at the heap. */
        serve_to_the_end(server);
        stock_withdraw_all(server);
        server->owner.lend(server->owner.context, LEND_UNTENDED);
        atomic_store_explicit(&server->phase, PHASE_LENT, memory_order_release);
    }
    lock_release(&server->begin_lock);
}

void server_start(struct server *server) {
    if (filters_now() == FILTERS_ADDED || atomic_load_explicit(&thread_stops, memory_order_seq_cst) > 0) {
        return;
    }
    /* Not while another thread forks, whose child would have a heap with the server in the midst of it. */
    if (!lock_try(&server->fork_lock)) {
        return;
    }
    int none = THREAD_NONE;
    if (atomic_compare_exchange_strong_explicit(&server->thread, &none, THREAD_STARTED, memory_order_seq_cst,
                                                memory_order_relaxed)) {
        /* Who stops it either sees that it was started, or is seen here. */
        if (atomic_load_explicit(&thread_stops, memory_order_seq_cst) > 0) {
            atomic_store_explicit(&server->thread, THREAD_NONE, memory_order_seq_cst);
        } else if (!thread_start(&server->worker, run, server, STACK_BYTES)) {
            atomic_store_explicit(&server->thread, THREAD_REFUSED, memory_order_relaxed);
        }
    }
    lock_release(&server->fork_lock);
}

void server_say_lost(struct server *server) {
    if (!atomic_exchange_explicit(&server->was_lost, true, memory_order_relaxed)) {
        server->lost(server->owner.context);
    }
}

/* Whether the server did anything since beat. */
static bool is_alive(const struct server *server, uint64_t *beat) {
    uint64_t now = atomic_load_explicit(&server->beat, memory_order_relaxed);
    bool alive = now != *beat;
    *beat = now;
    return alive;
}

/* Waits until the word is not seen any more; not where the server shows no life for so long. */
static bool wait_for_server(struct server *server, _Atomic(uint32_t) *word, uint32_t seen,
                            uint64_t patience_ns) {
    uint64_t beat = atomic_load_explicit(&server->beat, memory_order_relaxed);
    uint64_t start = clock_now_ns();
    while (atomic_load_explicit(word, memory_order_acquire) == seen) {
        if (is_alive(server, &beat)) {
            start = clock_now_ns();
        } else if (clock_now_ns() - start > patience_ns) {
            return false;
        }
        futex_wait(word, seen, server->patience_ns);
    }
    return true;
}

static bool has_thread(const struct server *server) {
    return atomic_load_explicit(&server->thread, memory_order_acquire) == THREAD_STARTED;
}

bool server_is_held(const struct server *server) {
    const struct lock *locks[] = {&server->fork_lock, &server->begin_lock, &server->open_lock,
                                  &server->sync.clients, &server->overflow.lock};
    bool found = false;
    for (size_t i = 0; i < sizeof locks / sizeof locks[0]; i++) {
        found |= lock_is_mine(locks[i]);
    }
    for (unsigned i = 0; i < server->endpoint_count; i++) {
        found |= server_is_open(server, i) && endpoint_is_mine(server_endpoint(server, i));
    }
    return found;
}

bool server_stop(struct server *server, uint64_t patience_ns) {
    int none = THREAD_NONE;
    atomic_compare_exchange_strong_explicit(&server->thread, &none, THREAD_REFUSED, memory_order_acq_rel,
                                            memory_order_relaxed);
    if (!has_thread(server)) {
        return !server_is_left_behind(server);
    }
    bool waits = !server_is_held(server);
    if (waits) {
        lock_acquire(&server->fork_lock);
    }
    uint32_t not_yet = STOPPING_NOT;
    atomic_compare_exchange_strong_explicit(&server->stopping, &not_yet, STOPPING, memory_order_seq_cst,
                                            memory_order_relaxed);
    server_ring(server);
    bool stopped = waits && wait_for_server(server, &server->stopping, STOPPING, patience_ns);
    if (waits) {
        lock_release(&server->fork_lock);
    }
    return stopped;
}

bool server_interrupts_client(const struct server *server) {
    bool found = server_is_held(server);
    for (unsigned i = 0; i < server->endpoint_count; i++) {
        found |= server_is_open(server, i) && endpoint_is_borrowed_by_me(server_endpoint(server, i));
    }
    for (size_t i = 0; i < CALLS; i++) {
        const struct call *call = &server->calls[i];
        uint32_t state = atomic_load_explicit(&call->state, memory_order_relaxed) & CALL_STATE;
        found |= state != CALL_FREE && state != CALL_ABANDONED &&
                 atomic_load_explicit(&call->claimer, memory_order_relaxed) == lock_self();
    }
    return found;
}

/* The caller's for the fork, at once or, unless it waits, within some tries. */
static bool acquire_for_fork(struct lock *lock, bool waits) {
    for (unsigned tries = 0; !waits && tries < FORK_TRIES && !lock_is_mine(lock); tries++) {
        lock_acquire_for_fork(lock, false);
        if (!lock_is_mine(lock)) {
            os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
        }
    }
    if (waits) {
        lock_acquire_for_fork(lock, true);
    }
    return lock_is_mine(lock);
}

static bool enter_for_fork(struct endpoint *endpoint, bool waits) {
    if (waits) {
        endpoint_enter(endpoint);
        return true;
    }
    bool entered = endpoint_try(endpoint);
    for (unsigned tries = 0; !entered && tries < FORK_TRIES; tries++) {
        os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
        entered = endpoint_try(endpoint);
    }
    return entered;
}

/* enter_all for a fork. A server that does not answer may itself be in what is to be entered, or have a
 * client wait there: then what cannot be entered is left. True if all is the caller's. */
static bool enter_all_for_fork(struct server *server, bool waits) {
    bool all = acquire_for_fork(&server->open_lock, waits);
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        all &= enter_for_fork(server_endpoint(server, server->open[i]), waits);
    }
    atomic_store_explicit(&server->sync.closing, true, memory_order_relaxed);
    all &= acquire_for_fork(&server->sync.clients, waits);
    atomic_store_explicit(&server->sync.closing, false, memory_order_relaxed);
    all &= acquire_for_fork(&server->overflow.lock, waits);
    return all;
}

/* The child has no other thread that could be in one. */
static void leave_all_after_fork(struct server *server, bool child) {
    lock_release_after_fork(&server->overflow.lock);
    lock_release_after_fork(&server->sync.clients);
    for (unsigned i = 0; i < server->endpoint_count; i++) {
        if (server_is_open(server, i) && (child || endpoint_is_mine(server_endpoint(server, i)))) {
            endpoint_leave(server_endpoint(server, i));
        }
    }
    lock_release_after_fork(&server->open_lock);
    if (child) {
        lock_reset_in_child(&server->overflow.lock);
        lock_reset_in_child(&server->sync.clients);
        lock_reset_in_child(&server->open_lock);
    }
}

void server_before_fork(struct server *server, bool interrupts) {
    if (interrupts || server_interrupts_client(server)) {
        /* The child goes without the server and its heap, so that nothing need be waited for. */
        if (lock_is_mine(&server->fork_lock)) {
            lock_acquire_for_fork(&server->fork_lock, true);
        }
        return;
    }
    lock_acquire_for_fork(&server->fork_lock, true);
    lock_acquire_for_fork(&server->begin_lock, true);
    bool parked = true;
    if (has_thread(server)) {
        atomic_store_explicit(&server->parking, PARKING_REQUESTED, memory_order_seq_cst);
        server_ring(server);
        uint32_t requested = PARKING_REQUESTED;
        parked =
            wait_for_server(server, &server->parking, PARKING_REQUESTED, PATIENCES * server->patience_ns) ||
            !atomic_compare_exchange_strong_explicit(&server->parking, &requested, PARKING_NONE,
                                                     memory_order_seq_cst, memory_order_relaxed);
    }
    server->forks = true;
    bool all = enter_all_for_fork(server, parked);
    if (!parked) {
        /* It may be in the midst of anything; but a heap that is lent has its locks, and stays lent while all
         * endpoints are the caller's. */
        if (!all || !server_is_lent(server)) {
            atomic_store_explicit(&server->left_behind, true, memory_order_relaxed);
        }
        server_say_lost(server);
    }
}

/* Nobody but the forked thread is there, and what others were at is at an end. */
static void start_over(struct server *server) {
    thread_forget(&server->worker);
    for (size_t i = 0; i < CALLS; i++) {
        atomic_store_explicit(&server->calls[i].state, CALL_FREE, memory_order_relaxed);
    }
    for (unsigned i = 0; i < server->endpoint_count; i++) {
        if (server_is_open(server, i)) {
            atomic_store_explicit(&server_endpoint(server, i)->borrowers, 0, memory_order_relaxed);
        }
    }
    atomic_store_explicit(&server->sync.ready, SYNC_NONE, memory_order_relaxed);
    atomic_store_explicit(&server->sync.done, 0, memory_order_relaxed);
    atomic_store_explicit(&server->state, SERVER_HOT, memory_order_relaxed);
    if (!server->left_behind) {
        atomic_store_explicit(&server->was_lost, false, memory_order_relaxed);
    }
    memset(server->deferred, 0, sizeof server->deferred);
    server->depth = 0;
    server->hot_until_ns = 0;
    server->crowd.looked_ns = 0;
    atomic_store_explicit(&server->starved, server_is_left_behind(server), memory_order_relaxed);
    if (server_is_left_behind(server)) {
        atomic_store_explicit(&server->thread, THREAD_REFUSED, memory_order_relaxed);
        return;
    }
    if (has_thread(server)) {
        atomic_store_explicit(&server->thread, THREAD_NONE, memory_order_relaxed);
        atomic_store_explicit(&server->operations, 0, memory_order_relaxed);
    }
    if (server_is_lent(server)) {
        bool for_good = load(&server->stopping) == STOPPED;
        server->owner.lend(server->owner.context, for_good ? LEND_FOR_GOOD : LEND_UNTENDED);
    } else {
        atomic_store_explicit(&server->phase, PHASE_NONE, memory_order_relaxed);
    }
}

/* In the child of a thread that interrupted itself among the clients: it ends there what it began. */
static void lose_heap(struct server *server) {
    struct lock *locks[] = {&server->fork_lock, &server->begin_lock, &server->open_lock,
                            &server->sync.clients, &server->overflow.lock};
    for (size_t i = 0; i < sizeof locks / sizeof locks[0]; i++) {
        lock_reset_in_child(locks[i]);
    }
    for (unsigned i = 0; i < server->endpoint_count; i++) {
        if (server_is_open(server, i) && !endpoint_is_mine(server_endpoint(server, i))) {
            endpoint_leave(server_endpoint(server, i));
        }
    }
    atomic_store_explicit(&server->phase, PHASE_RUNNING, memory_order_relaxed);
    atomic_store_explicit(&server->left_behind, true, memory_order_relaxed);
    atomic_store_explicit(&server->was_lost, true, memory_order_relaxed); /* nothing to report */
    start_over(server);
}

/* Whether server_before_fork waited for the server and its clients. */
static bool has_waited(const struct server *server) {
    return lock_is_mine(&server->fork_lock) &&
           atomic_load_explicit(&server->fork_lock.state, memory_order_relaxed) < LOCK_KEPT;
}

void server_after_fork(struct server *server, bool child) {
    if (!has_waited(server)) {
        lock_release_after_fork(&server->fork_lock);
        if (child) {
            lose_heap(server);
        }
        return;
    }
    leave_all_after_fork(server, child);
    server->forks = false;
    if (child && server_is_left_behind(server)) {
        atomic_store_explicit(&server->phase, PHASE_RUNNING, memory_order_relaxed);
    }
    if (child) {
        start_over(server);
    } else if (has_thread(server)) {
        /* The child was. */
        atomic_store_explicit(&server->left_behind, false, memory_order_relaxed);
    }
    if (load(&server->parking) == PARKING_PARKED) {
        atomic_store_explicit(&server->parking, PARKING_NONE, memory_order_release);
        futex_wake_all(&server->parking);
    }
    lock_release_after_fork(&server->begin_lock);
    lock_release_after_fork(&server->fork_lock);
}
