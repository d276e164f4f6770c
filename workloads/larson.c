/* A long-running server, after Larson and Krishnan's "Memory Allocation for Long-Running Server
 * Applications". Each thread has an array of blocks of random size, and replaces random ones; after a number
 * of operations it passes the array to a thread that it creates, and ends. So blocks are freed by later
 * threads than those that allocated them, and threads come and go. The main thread allocates the first
 * blocks. Written from the published description; shares no code with the authors' program. */
#include "support.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "larson";

struct server {
    unsigned long least;
    unsigned long most;
    unsigned long blocks;
    unsigned long operations;  /* of one thread, before it creates its successor */
    unsigned long generations; /* threads of one chain, or 0: as many as the time allows */
    pthread_attr_t detached;
    atomic_bool stopping;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    unsigned long serving; /* chains whose last thread has not ended */
};

/* What a thread hands on to its successor. Each has cache lines of its own. */
struct chain {
    _Alignas(128) struct server *server;
    void **blocks;
    unsigned long long random;
    unsigned long operations; /* of all its threads */
    unsigned long threads;
};

static void *new_block(const struct server *server, unsigned long long *random) {
    size_t size = random_between(random, server->least, server->most);
    char *block = checked(malloc(size), program_name);
    block[0] = 1;
    block[size - 1] = 1;
    return block;
}

static void *serve(void *argument) {
    struct chain *chain = argument;
    struct server *server = chain->server;
    unsigned long long random = chain->random;
    unsigned long done = 0;
    while (done < server->operations && !atomic_load_explicit(&server->stopping, memory_order_relaxed)) {
        void **slot = &chain->blocks[random_next(&random) % server->blocks];
        free(*slot);
        *slot = new_block(server, &random);
        done++;
    }
    chain->random = random;
    chain->operations += done;
    chain->threads++;
    bool is_last = chain->threads == server->generations;
    if (!is_last && !atomic_load_explicit(&server->stopping, memory_order_relaxed)) {
        pthread_t successor;
        if (pthread_create(&successor, &server->detached, serve, chain) != 0) {
            fail(program_name, "cannot start a thread");
        }
        return NULL;
    }
    (void)pthread_mutex_lock(&server->lock);
    server->serving--;
    (void)pthread_cond_signal(&server->ended);
    (void)pthread_mutex_unlock(&server->lock);
    return NULL;
}

static struct chain *prepare(struct server *server, unsigned long threads) {
    struct chain *chains =
        checked(aligned_alloc(_Alignof(struct chain), threads * sizeof *chains), program_name);
    for (unsigned long t = 0; t < threads; t++) {
        chains[t] = (struct chain){.server = server, .random = t};
        chains[t].blocks = checked(calloc(server->blocks, sizeof(void *)), program_name);
        for (unsigned long i = 0; i < server->blocks; i++) {
            chains[t].blocks[i] = new_block(server, &chains[t].random);
        }
    }
    return chains;
}

/* Returns the seconds from the first thread's start until the threads are told
 * to stop or, if their number is given, until the last one ends. */
static double run(struct server *server, struct chain *chains, unsigned long threads, double seconds) {
    server->serving = threads;
    double begin = now_seconds();
    for (unsigned long t = 0; t < threads; t++) {
        pthread_t first;
        if (pthread_create(&first, &server->detached, serve, &chains[t]) != 0) {
            fail(program_name, "cannot start a thread");
        }
    }
    double end = 0;
    if (server->generations == 0) {
        sleep_seconds(seconds);
        atomic_store(&server->stopping, true);
        end = now_seconds();
    }
    (void)pthread_mutex_lock(&server->lock);
    while (server->serving > 0) {
        (void)pthread_cond_wait(&server->ended, &server->lock);
    }
    (void)pthread_mutex_unlock(&server->lock);
    return (server->generations == 0 ? end : now_seconds()) - begin;
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long milliseconds = 2000;
    unsigned long least = 8;
    unsigned long most = 1000;
    unsigned long blocks = 5000;
    unsigned long operations = 500000;
    unsigned long generations = 0;
    const struct option_spec options[] = {
        {"threads", "concurrent threads", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"seconds", "duration", OPTION_SECONDS, &milliseconds, 1, 1000000000, NULL},
        {"min", "minimum bytes in a block", OPTION_COUNT, &least, 1, 1UL << 30, NULL},
        {"max", "maximum bytes in a block", OPTION_COUNT, &most, 1, 1UL << 30, NULL},
        {"blocks", "blocks of each thread", OPTION_COUNT, &blocks, 1, 100000000, NULL},
        {"operations", "blocks that a thread replaces before it passes its array on", OPTION_COUNT,
         &operations, 1, 1000000000000, NULL},
        {"generations", "threads that serve each array in turn, instead of --seconds", OPTION_COUNT,
         &generations, 1, 1000000000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads replace random blocks in an array, and pass the array to new threads.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (least > most) {
        reject_arguments(program_name, "--min is more than --max");
    }

    /* Not on the stack: a thread may still be inside pthread_create, which reads the attributes, after its
     * successor has ended and main has returned. */
    static struct server server;
    server = (struct server){
        .least = least,
        .most = most,
        .blocks = blocks,
        .operations = operations,
        .generations = generations,
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .ended = PTHREAD_COND_INITIALIZER,
    };
    (void)pthread_attr_init(&server.detached);
    (void)pthread_attr_setdetachstate(&server.detached, PTHREAD_CREATE_DETACHED);
    struct chain *chains = prepare(&server, threads);
    double elapsed = run(&server, chains, threads, (double)milliseconds / 1e3);

    unsigned long done = 0;
    unsigned long started = 0;
    for (unsigned long t = 0; t < threads; t++) {
        done += chains[t].operations;
        started += chains[t].threads;
    }
    printf("{\"workload\": \"larson\", \"threads\": %lu, \"min\": %lu, \"max\": %lu, \"blocks\": %lu, "
           "\"operations\": %lu, \"threads_started\": %lu, \"allocations\": %lu, \"frees\": %lu, "
           "\"seconds\": %.6f, \"operations_per_second\": %.0f}\n",
           threads, least, most, blocks, operations, started, threads * blocks + done, done, elapsed,
           (double)done / elapsed);
    return 0;
}
