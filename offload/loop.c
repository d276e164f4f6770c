#include "offload/loop.h"

#include "base/size.h"
#include "offload/prefill.h"
#include "offload/serve.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/random.h"
#include "os/syscall.h"
#include "os/text.h"

/* Without work the server polls for so long before it naps. */
#define POLL_NS 1000000ULL
/* The first nap. In a nap of up to SHORT_NAP_NS the server is soon back by
 * itself: a client that takes the last of a queue does not wake it. */
#define MIN_NAP_NS   50000ULL
#define SHORT_NAP_NS 1000000ULL
#define MAX_NAP_NS   100000000ULL
/* The length of an epoch of the predictors. */
#define EPOCH_NS 100000000ULL
/* Passes between two checks of the clock while there is work. */
#define PASSES_PER_CLOCK 64
/* That the server makes way for another thread that wants its lock. */
#define CLAIM_NS 1000000ULL
/* When it stops serving: how long it waits for a thread that is in an
 * endpoint. */
#define DRAIN_NAPS 200

bool server_is_stopped(const struct server *server) {
    return atomic_load_explicit(&thread_start_holds, memory_order_seq_cst) > 0 ||
           atomic_load_explicit(&server->words.thread, memory_order_seq_cst) == THREAD_ENDED;
}

/* ---- rest ---- */

/* Checked after the server has said that it sleeps: it finds what a client
 * published before the client saw that. */
static bool is_wanted(struct server *server) {
    bool wanted = server_is_stopped(server) ||
                  atomic_load_explicit(&server->mailbox.ready, memory_order_seq_cst) == MAILBOX_REQUEST ||
                  atomic_load_explicit(&server->words.is_late, memory_order_seq_cst);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        wanted = wanted || !ring_is_empty(&endpoint->ring);
    }
    return wanted;
}

/* ns: 0 for good. */
static void sleep_for(struct server *server, uint64_t ns) {
    uint32_t wakeups = atomic_load_explicit(&server->words.wakeup, memory_order_seq_cst);
    uint32_t state = ns == 0 ? SERVER_SLEEPS : ns > SHORT_NAP_NS ? SERVER_DOZES : SERVER_NAPS;
    atomic_store_explicit(&server->words.state, state, memory_order_seq_cst);
    if (!is_wanted(server)) {
        count_one(&server->counts.naps);
        futex_wait(&server->words.wakeup, wakeups, ns);
    }
    atomic_store_explicit(&server->words.state, SERVER_AWAKE, memory_order_seq_cst);
}

/* Without work: polls for a while, then naps, then sleeps. */
static void rest(struct server *server, uint64_t now) {
    struct server_own *own = &server->own;
    if (own->poll_until_ns == 0) {
        own->poll_until_ns = now + POLL_NS;
    }
    if (now < own->poll_until_ns) {
        for (int i = 0; i < 4; i++) {
            cpu_relax();
        }
        return;
    }
    bool for_good = own->idle && own->nap_ns >= MAX_NAP_NS;
    uint64_t start = clock_now_ns(); /* the epoch's work is over */
    sleep_for(server, for_good ? 0 : own->nap_ns);
    own->contention.slept_ns += clock_now_ns() - start;
    /* A wakeup from a sleep for good may leave something to return at the end
     * of an epoch. */
    own->nap_ns = for_good ? MIN_NAP_NS : size_min(own->nap_ns * 2, MAX_NAP_NS);
}

/* ---- the CPU ---- */

static void choose_cpu(struct server *server) {
    static const char *const messages[] = {
        [AFFINITY_NUMBER] = "server_cpu names a CPU that the process may not run on: choosing another",
        [AFFINITY_SIBLING] =
            "server_cpu=sibling, but there is no free hyperthread of that core: choosing a CPU",
        [AFFINITY_CORE] = "server_cpu=core, but there is no other core of that socket: choosing a CPU",
        [AFFINITY_SOCKET] = "server_cpu=socket, but there is no other socket: choosing a CPU",
    };
    struct server_own *own = &server->own;
    struct affinity_request wanted = server->setup.cpu;
    /* Differs for processes that start together, also where each is the first
     * of its container: the end of the address space is randomized. */
    uint64_t seed = (uint64_t)os_syscall(SYS_getpid) * RANDOM_GOLDEN_RATIO ^ lock_self();
    affinity_update(&own->survey, TOPOLOGY_MACHINE, (int)os_syscall(SYS_gettid));
    struct affinity_choice choice = affinity_choose(&own->survey.view, wanted, seed);
    if (!own->reported && choice.cpu >= 0 && !choice.met) {
        own->reported = true;
        text_write_line(2, "calmalloc: %s", messages[wanted.kind]);
    }
    thread_leave_files(); /* so that its files in /proc and /sys are not the program's; it prints no more */
    own->keeps_cpu = wanted.kind == AFFINITY_NUMBER && choice.met;
    if (choice.cpu >= 0) {
        cpu_pin((unsigned)choice.cpu);
    }
}

static void start_serving(struct server *server) {
    choose_cpu(server);
    server->own.contention.checked_ns = 0;
    atomic_store_explicit(&server->words.serves, true, memory_order_release);
}

/* From here on clients work on the heap themselves. */
static void stop_serving(struct server *server) {
    atomic_store_explicit(&server->words.serves, false, memory_order_seq_cst);
    lock_acquire(&server->lock);
    server_drain(server, DRAIN_NAPS);
    lock_release(&server->lock);
}

static void wait_for_cpu(struct server *server) {
    struct contention *contention = &server->own.contention;
    sleep_for(server, contention_wait_ns(contention, clock_now_ns(), MAX_NAP_NS));
    lock_acquire(&server->lock);
    server_serve(server); /* a client may have been late to see that the server does not serve */
    lock_release(&server->lock);
    if (contention_is_over(contention, clock_now_ns())) {
        start_serving(server);
    }
}

/* ---- passes ---- */

static void loop_end_epoch(struct server *server, uint64_t now) {
    if (now - server->own.epoch_start_ns < EPOCH_NS) {
        return;
    }
    server->own.epoch_start_ns = now;
    bool remains = false;
    lock_acquire(&server->lock);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        remains |= prefill_end_epoch(server, endpoint);
    }
    lock_release(&server->lock);
    /* A server that sleeps for good ends no later epoch, and an idle program
     * would keep what is prefilled. */
    server->own.idle = !remains;
}

static void pass(struct server *server, unsigned number) {
    struct server_own *own = &server->own;
    lock_acquire(&server->lock);
    bool worked = server_serve(server);
    worked |= prefill_one(server);
    lock_release(&server->lock);
    if (worked) {
        own->poll_until_ns = 0;
        own->nap_ns = MIN_NAP_NS;
        own->idle = false;
        if (number % PASSES_PER_CLOCK != 0) {
            return;
        }
    }
    uint64_t now = clock_now_ns();
    loop_end_epoch(server, now);
    if (!own->keeps_cpu && contention_check(&own->contention, now)) {
        count_one(&server->counts.pauses);
        contention_back_off(&own->contention, now);
        stop_serving(server);
    } else if (!worked) {
        rest(server, now);
    }
}

static void make_way(struct server *server) {
    uint32_t claims = atomic_load_explicit(&server->words.claims, memory_order_relaxed);
    if (claims != 0) {
        futex_wait(&server->words.claims, claims, CLAIM_NS);
    }
}

void server_loop(void *argument) {
    struct server *server = argument;
    server->own.nap_ns = MIN_NAP_NS;
    server->own.poll_until_ns = 0;
    server->own.idle = false;
    start_serving(server);
    for (unsigned number = 0; !server_is_stopped(server); number++) {
        make_way(server);
        if (server_serves(server)) {
            pass(server, number);
        } else {
            wait_for_cpu(server);
        }
    }
    stop_serving(server);
    int started = THREAD_STARTED;
    atomic_compare_exchange_strong_explicit(&server->words.thread, &started, THREAD_NONE,
                                            memory_order_seq_cst, memory_order_relaxed);
}
