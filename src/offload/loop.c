#include "offload/loop.h"

#include "base/size.h"
#include "offload/heap_mode.h"
#include "offload/prefill.h"
#include "offload/serve.h"
#include "os/clock.h"
#include "os/futex.h"

/* Without work the server polls for so long before it naps. */
#define POLL_NS 1000000ULL
/* The first nap. In a nap of up to SHORT_NAP_NS the server is soon back by itself: a client that takes the
 * last of a queue does not wake it. */
#define MIN_NAP_NS   50000ULL
#define SHORT_NAP_NS 1000000ULL
#define MAX_NAP_NS   100000000ULL
/* Of the predictors. */
#define EPOCH_NS 100000000ULL
/* Passes between two checks of the clock while there is work. */
#define PASSES_PER_CLOCK 64

/* Checked after the server has said that it sleeps: it finds what a client published before the client saw
 * that. */
static bool is_wanted(struct server *server) {
    bool wanted = server_has_deferred(server) ||
                  atomic_load_explicit(&server->mailbox.ready, memory_order_seq_cst) == MAILBOX_REQUEST ||
                  atomic_load_explicit(&server->parking, memory_order_seq_cst) == PARKING_REQUESTED ||
                  atomic_load_explicit(&server->stopping, memory_order_seq_cst) != STOPPING_NONE ||
                  atomic_load_explicit(&server->unresponsive_from_ns, memory_order_seq_cst) != 0 ||
                  !overflow_is_empty(&server->overflow);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        wanted = wanted || ring_filled(&endpoint->ring, true) > 0;
    }
    return wanted;
}

/* ns: 0 for good. */
static void sleep_for(struct server *server, uint64_t ns) {
    uint32_t wakeups = atomic_load_explicit(&server->wakeup, memory_order_seq_cst);
    atomic_store_explicit(&server->state, ns == 0 || ns > SHORT_NAP_NS ? SERVER_SLEEPS : SERVER_NAPS,
                          memory_order_seq_cst);
    if (!is_wanted(server)) {
        count_one(&server->counts.naps);
        futex_wait(&server->wakeup, wakeups, ns);
    }
    atomic_store_explicit(&server->state, SERVER_AWAKE, memory_order_seq_cst);
}

/* In shared mode: purges, as the helper of a heap without a server does. */
static void wait_for_cpu(struct server *server) {
    sleep_for(server, contention_wait_ns(&server->contention, clock_now_ns(), MAX_NAP_NS));
    server_serve(server); /* nothing is in the rings, but blocks may be in the overflow */
    server->idle = server->hooks.tick(server->hooks.context);
    if (contention_is_over(&server->contention, clock_now_ns())) {
        server->hooks.choose_cpu(server->hooks.context);
        heap_mode_take_exclusive(server);
    }
}

static void loop_end_epoch(struct server *server, uint64_t now) {
    if (now - server->epoch_start_ns < EPOCH_NS) {
        return;
    }
    server->epoch_start_ns = now;
    bool remains = false;
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        remains |= prefill_end_epoch(server, endpoint);
    }
    /* A server that sleeps for good ends no later epoch, and an idle program would keep what is prefilled. */
    server->idle = server->hooks.tick(server->hooks.context) && !remains;
}

/* Without work: polls for a while, then naps, then sleeps. */
static void rest(struct server *server, uint64_t now) {
    if (server->poll_until_ns == 0) {
        server->poll_until_ns = now + POLL_NS;
    }
    if (now < server->poll_until_ns) {
        for (int i = 0; i < 4; i++) {
            cpu_relax();
        }
        return;
    }
    bool for_good = server->idle && server->nap_ns >= MAX_NAP_NS;
    uint64_t start = clock_now_ns(); /* the epoch's work is over */
    sleep_for(server, for_good ? 0 : server->nap_ns);
    server->contention.slept_ns += clock_now_ns() - start;
    /* A wakeup from a sleep for good may leave something to purge at the end of an epoch. */
    server->nap_ns = for_good ? MIN_NAP_NS : size_min(server->nap_ns * 2, MAX_NAP_NS);
}

static void loop_park(struct server *server) {
    uint32_t requested = PARKING_REQUESTED;
    if (!atomic_compare_exchange_strong_explicit(&server->parking, &requested, PARKING_PARKED,
                                                 memory_order_seq_cst, memory_order_relaxed)) {
        return;
    }
    futex_wake_all(&server->parking);
    while (atomic_load_explicit(&server->parking, memory_order_acquire) == PARKING_PARKED) {
        futex_wait(&server->parking, PARKING_PARKED, 0);
    }
    server->contention.checked_ns = 0;
}

/* True if the server is to end. */
static bool check_requests(struct server *server) {
    if (atomic_load_explicit(&server->parking, memory_order_relaxed) == PARKING_REQUESTED) {
        loop_park(server);
    }
    return atomic_load_explicit(&server->stopping, memory_order_relaxed) != STOPPING_NONE;
}

/* One pass in exclusive mode. */
static void pass(struct server *server, unsigned number) {
    bool worked = server_serve(server);
    worked |= prefill_one(server);
    if (worked) {
        server->poll_until_ns = 0;
        server->nap_ns = MIN_NAP_NS;
        server->idle = false;
        if (number % PASSES_PER_CLOCK != 0) {
            return;
        }
    }
    uint64_t now = clock_now_ns();
    loop_end_epoch(server, now);
    if (!server->always_exclusive && contention_check(&server->contention, now)) {
        count_one(&server->counts.shared_switches);
        contention_back_off(&server->contention, now);
        heap_mode_share(server, SHARED_BACKGROUND);
    } else if (!worked) {
        rest(server, now);
    }
}

void server_loop(void *argument) {
    struct server *server = argument;
    server->nap_ns = MIN_NAP_NS;
    server->hooks.choose_cpu(server->hooks.context);
    heap_mode_take_exclusive(server);
    for (unsigned number = 0; !check_requests(server); number++) {
        if (server_is_shared(server)) {
            wait_for_cpu(server);
        } else {
            pass(server, number);
        }
    }
    if (server_is_shared(server)) {
        heap_mode_take_exclusive(server); /* waits for the threads inside */
    }
    heap_mode_share(server, SHARED_FOR_GOOD);
    atomic_store_explicit(&server->thread, THREAD_REFUSED, memory_order_release);
    atomic_store_explicit(&server->stopping, STOPPING_STOPPED, memory_order_release);
    futex_wake_all(&server->stopping);
}
