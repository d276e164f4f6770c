/*
 * The CPU caches in each of their modes: more threads than CPUs pop and push tokens at full speed and
 * migrate between CPUs, while signals interrupt them and other threads flush the caches. No token may be
 * lost or appear twice.
 */
#include "cache/cpu_cache.h"
#include "cache/locked.h"
#include "cache/rseq.h"
#include "os/vm.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

#include "check.h"
#include "lost_lock.h"

#define TOKENS      8192
#define CLASSES     5
#define MAX_THREADS 64
#define FLUSHER     MAX_THREADS /* its name among the owners */
#define MAX_STASH   400
#define RSEQ_CPU_ID 4

static const uint32_t some_classes[CLASSES] = {1, 5, 17, 40, 72};

static struct size_classes classes;
static struct cpu_caches caches = CPU_CACHES_UNREADY;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static uint64_t enough_operations = 600000;
#else
static uint64_t enough_operations = 15000000;
#endif
static uint64_t seed;
static size_t threads;
static cpu_set_t allowed;
static _Atomic(bool) stop;
static _Atomic(uint64_t) signals, operations, batches, flushed, moves, grown;
static _Atomic(int) place_of[TOKENS]; /* 0: in a cache; -1: in the pool; else who has it */

/* What was flushed waits here for threads that find their cache empty. */
static struct {
    pthread_mutex_t mutex;
    void *tokens[TOKENS];
    size_t count;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER};

struct worker {
    pthread_t thread;
    uint64_t random;
    int name;
    void *stash[MAX_STASH + MAX_MAGAZINE_BLOCKS];
    size_t count;
};

static struct worker workers[MAX_THREADS];

static void *token(size_t number) {
    return (void *)((number + 1) * 16);
}

static size_t number_of(const void *token) {
    size_t number = (size_t)token / 16 - 1;
    CHECK((size_t)token % 16 == 0 && number < TOKENS);
    return number;
}

static uint32_t class_of(const void *token) {
    return some_classes[number_of(token) % CLASSES];
}

/* In the pool a token's place is -1. */
static void change_place(const void *token, int from, int to) {
    CHECK_EQUAL(atomic_exchange(&place_of[number_of(token)], to) + 1, from + 1);
}

static void claim(const void *token, int name) {
    change_place(token, 0, name);
}

static void leave(const void *token, int name) {
    change_place(token, name, 0);
}

static void pool_put(void *const *tokens, size_t count, int name) {
    for (size_t i = 0; i < count; i++) {
        change_place(tokens[i], name, -1);
    }
    pthread_mutex_lock(&pool.mutex);
    CHECK(pool.count + count <= TOKENS);
    memcpy(pool.tokens + pool.count, tokens, count * sizeof *tokens);
    pool.count += count;
    pthread_mutex_unlock(&pool.mutex);
}

static size_t pool_take(void **tokens, size_t count, int name) {
    pthread_mutex_lock(&pool.mutex);
    count = count < pool.count ? count : pool.count;
    pool.count -= count;
    memcpy(tokens, pool.tokens + pool.count, count * sizeof *tokens);
    pthread_mutex_unlock(&pool.mutex);
    for (size_t i = 0; i < count; i++) {
        change_place(tokens[i], -1, name);
    }
    return count;
}

/* As the fast paths do it. */
static bool pop_one(uint32_t size_class, void **popped) {
    return cpu_cache_is_rseq(&caches) ? rseq_pop(&caches, size_class, popped)
                                      : cpu_cache_pop_some(&caches, size_class, popped, 1) == 1;
}

static bool push_one(uint32_t size_class, void *block) {
    return cpu_cache_is_rseq(&caches) ? rseq_push(&caches, size_class, block)
                                      : cpu_cache_push_some(&caches, size_class, &block, 1) == 1;
}

static void change_cpu(struct worker *worker) {
    cpu_set_t one;
    CPU_ZERO(&one);
    size_t wanted = check_random(&worker->random) % (size_t)CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && wanted-- == 0) {
            CPU_SET(cpu, &one);
        }
    }
    CHECK(sched_setaffinity(0, sizeof one, check_random(&worker->random) % 4 == 0 ? &allowed : &one) == 0);
    atomic_fetch_add_explicit(&moves, 1, memory_order_relaxed);
}

static void push_last(struct worker *worker) {
    void *last = worker->stash[worker->count - 1];
    leave(last, worker->name);
    if (push_one(class_of(last), last)) {
        worker->count--;
    } else {
        claim(last, worker->name);
        cpu_cache_open(&caches, class_of(last));
    }
}

static void pop_to_stash(struct worker *worker, uint32_t size_class) {
    void *popped;
    if (pop_one(size_class, &popped)) {
        CHECK_EQUAL(class_of(popped), size_class);
        claim(popped, worker->name);
        worker->stash[worker->count++] = popped;
    }
}

/* Tokens of one class from the end of the stash on, as far as they lie together. */
static void push_batch(struct worker *worker, uint32_t size_class) {
    void *batch[MAX_MAGAZINE_BLOCKS];
    size_t count = 0;
    size_t wanted = 1 + check_random(&worker->random) % classes.of[size_class].batch;
    for (size_t i = worker->count; i-- > 0 && count < wanted;) {
        if (class_of(worker->stash[i]) == size_class) {
            batch[count++] = worker->stash[i];
            worker->stash[i] = worker->stash[--worker->count];
            leave(batch[count - 1], worker->name);
        }
    }
    size_t pushed = count == 0 ? 0 : cpu_cache_push_some(&caches, size_class, batch, count);
    CHECK(pushed <= count);
    for (size_t i = pushed; i < count; i++) {
        claim(batch[i], worker->name);
        worker->stash[worker->count++] = batch[i];
    }
    atomic_fetch_add_explicit(&batches, 1, memory_order_relaxed);
}

static void pop_batch(struct worker *worker, uint32_t size_class) {
    void *batch[MAX_MAGAZINE_BLOCKS];
    size_t wanted = 1 + check_random(&worker->random) % classes.of[size_class].batch;
    size_t popped = cpu_cache_pop_some(&caches, size_class, batch, wanted);
    CHECK(popped <= wanted);
    for (size_t i = 0; i < popped; i++) {
        CHECK_EQUAL(class_of(batch[i]), size_class);
        claim(batch[i], worker->name);
        worker->stash[worker->count++] = batch[i];
    }
}

static void use_pool(struct worker *worker) {
    if (worker->count < MAX_STASH / 4) {
        worker->count += pool_take(&worker->stash[worker->count], 64, worker->name);
    } else if (worker->count > MAX_STASH) {
        worker->count -= 64;
        pool_put(&worker->stash[worker->count], 64, worker->name);
    }
}

#ifndef sigev_notify_thread_id /* glibc has no name for it */
#define sigev_notify_thread_id _sigev_un._tid
#endif

static void start_timer(void) {
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
    event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
    timer_t timer;
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
    struct itimerspec often = {{0, 150000}, {0, 150000}};
    CHECK(timer_settime(timer, 0, &often, NULL) == 0);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    start_timer();
    for (uint64_t round = 0; !atomic_load_explicit(&stop, memory_order_relaxed); round++) {
        uint32_t size_class = some_classes[check_random(&worker->random) % CLASSES];
        switch (check_random(&worker->random) % 16) {
        case 0:
            push_batch(worker, size_class);
            break;
        case 1:
            if (worker->count < MAX_STASH) {
                pop_batch(worker, size_class);
            }
            break;
        case 2:
            use_pool(worker);
            break;
        default:
            if (round / 100 % 2 == 0 && worker->count > 0) {
                push_last(worker);
            } else if (worker->count < MAX_STASH) {
                pop_to_stash(worker, size_class);
            }
        }
        if (round % 64 == 0) {
            cpu_cache_ran_empty(&caches, size_class);
            grown += cpu_cache_ran_full(&caches, size_class);
        }
        if (round % 8192 == 0) {
            change_cpu(worker);
            cpu_cache_open(&caches, size_class);
        }
        if (round % 1024 == 0) {
            atomic_fetch_add_explicit(&operations, 1024, memory_order_relaxed);
        }
    }
    return NULL;
}

static void to_pool(void *context, void *const *blocks, size_t count) {
    (void)context;
    for (size_t i = 0; i < count; i++) {
        CHECK_EQUAL(class_of(blocks[i]), class_of(blocks[0]));
        claim(blocks[i], FLUSHER);
    }
    pool_put(blocks, count, FLUSHER);
    atomic_fetch_add(&flushed, count);
}

static void *flush(void *unused) {
    (void)unused;
    uint64_t random = seed * 4242;
    while (!atomic_load(&stop)) {
        unsigned number = (unsigned)(check_random(&random) % caches.count);
        cpu_cache_flush(&caches, number, check_random(&random) % 8 == 0, to_pool, NULL);
        size_t bytes;
        size_t max_bytes;
        CHECK(cpu_caches_blocks(&caches, &bytes) <= cpu_caches_max_blocks(&caches, &max_bytes));
        CHECK(bytes <= max_bytes);
        if (check_random(&random) % 16 == 0) {
            check_nap(100000);
        }
    }
    return NULL;
}

static void on_signal(int number) {
    (void)number;
    atomic_fetch_add_explicit(&signals, 1, memory_order_relaxed);
}

static void check_all_tokens(void) {
    static bool found[TOKENS];
    size_t total = 0;
    for (unsigned number = 0; number < caches.count; number++) {
        cpu_cache_flush(&caches, number, false, to_pool, NULL);
    }
    size_t bytes;
    CHECK_EQUAL(cpu_caches_blocks(&caches, &bytes), 0);
    for (size_t i = 0; i < threads; i++) {
        pool_put(workers[i].stash, workers[i].count, workers[i].name);
    }
    for (size_t i = 0; i < pool.count; i++) {
        size_t number = number_of(pool.tokens[i]);
        CHECK(!found[number]);
        found[number] = true;
        total++;
    }
    CHECK_EQUAL(total, TOKENS);
}

static bool has_done_enough(void) {
    return operations >= enough_operations && flushed > 1000 && moves > 50 && signals > 1000 && grown > 100;
}

static void run_mode(const char *name, struct rseq_offsets place, enum cache_mode mode) {
    pthread_t flushers[2];
    CHECK(cpu_caches_init(&caches, &classes, place));
    cpu_caches_start(&caches, mode);
    CHECK_EQUAL(cpu_cache_is_rseq(&caches), mode == CACHE_RSEQ);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    for (size_t i = 0; i < TOKENS; i++) {
        pool.tokens[pool.count++] = token(i);
        atomic_store(&place_of[i], -1);
    }
    for (size_t i = 0; i < threads; i++) {
        workers[i].name = (int)i + 1;
        workers[i].random = (i + seed) * 2654435761U;
        CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    for (size_t i = 0; i < 2; i++) {
        CHECK(pthread_create(&flushers[i], NULL, flush, NULL) == 0);
    }
    WAIT_UNTIL(has_done_enough());
    atomic_store(&stop, true);
    for (size_t i = 0; i < threads; i++) {
        CHECK(pthread_join(workers[i].thread, NULL) == 0);
    }
    for (size_t i = 0; i < 2; i++) {
        CHECK(pthread_join(flushers[i], NULL) == 0);
    }
    printf("%s: %llu operations, %llu batches, %llu flushed in %llu flushes, %llu signals, %llu moves, "
           "%llu grown\n",
           name, (unsigned long long)operations, (unsigned long long)batches, (unsigned long long)flushed,
           (unsigned long long)caches.flushes, (unsigned long long)signals, (unsigned long long)moves,
           (unsigned long long)grown);
    check_all_tokens();
}

static void run_locked(void) {
    run_mode("locked", (struct rseq_offsets){0}, CACHE_LOCKED);
}

static void run_rseq(void) {
    run_mode("restartable sequences", rseq_find(), CACHE_RSEQ);
}

/* As on kernels without virtual CPU numbers. */
static void run_rseq_by_cpu(void) {
    struct rseq_offsets place = rseq_find();
    place.cpu_number = place.sequence - RSEQ_CS + RSEQ_CPU_ID;
    run_mode("restartable sequences by CPU", place, CACHE_RSEQ);
}

/* ---- one thread ---- */

static size_t counted;

static void count_blocks(void *context, void *const *blocks, size_t count) {
    (void)context, (void)blocks;
    counted += count;
}

/* So many fit into a class's stack, which is empty before and after. */
static size_t room(uint32_t size_class) {
    void *block;
    size_t count = 0;
    while (push_one(size_class, token(count))) {
        count++;
    }
    for (size_t i = count; i-- > 0;) {
        CHECK(pop_one(size_class, &block) && block == token(i));
    }
    CHECK(!pop_one(size_class, &block));
    return count;
}

static void check_caches(void) {
    for (unsigned number = 0; number < caches.count; number++) {
        cpu_cache_flush(&caches, number, true, count_blocks, NULL);
    }
}

static void turn(uint32_t size_class, unsigned times, bool both_ways) {
    for (unsigned i = 0; i < times; i++) {
        if (both_ways) {
            cpu_cache_ran_empty(&caches, size_class);
        }
        cpu_cache_ran_full(&caches, size_class);
    }
}

/* A stack grows when it runs full and empty over and over, up to its most, and shrinks when it does not any
 * more. */
static void check_growth(void) {
    const uint32_t size_class = 4;
    cpu_cache_open(&caches, size_class);
    cpu_cache_open(&caches, size_class + 1);
    size_t least = classes.of[size_class].max_cached;
    size_t most = classes.of[size_class].max_grown;
    CHECK(most >= least * 2);
    check_caches();
    turn(size_class, 100, false); /* one that only frees */
    CHECK_EQUAL(room(size_class), least);
    check_caches();
    turn(size_class, GROWTH_TURNS - 1, true);
    CHECK_EQUAL(room(size_class), least);
    check_caches(); /* counts anew */
    turn(size_class, GROWTH_TURNS - 1, true);
    CHECK_EQUAL(room(size_class), least);
    turn(size_class, 1, true);
    CHECK_EQUAL(room(size_class), least * 2);
    turn(size_class, 100, true);
    CHECK_EQUAL(room(size_class), most);
    CHECK_EQUAL(room(size_class + 1), classes.of[size_class + 1].max_cached);

    /* No lower than what is in it. */
    for (size_t i = 0; i < most; i++) {
        CHECK(push_one(size_class, token(i)));
    }
    check_caches();
    check_caches();
    void *block;
    CHECK(!push_one(size_class, token(most)));
    for (size_t i = most; i-- > 0;) {
        CHECK(pop_one(size_class, &block) && block == token(i));
    }
    for (int i = 0; i < 4; i++) {
        check_caches();
    }
    CHECK_EQUAL(room(size_class), least);

    turn(size_class, 100, true);
    for (size_t i = 0; i < most; i++) {
        CHECK(push_one(size_class, token(i)));
    }
    counted = 0;
    for (unsigned number = 0; number < caches.count; number++) {
        cpu_cache_flush(&caches, number, false, count_blocks, NULL);
    }
    CHECK_EQUAL(counted, most);
    CHECK(cpu_cache_open(&caches, size_class));
    CHECK_EQUAL(room(size_class), least);

    /* All together no further than they may. */
    size_t grown_bytes = 0;
    for (uint32_t each = 1; each < classes.count; ++each) {
        cpu_cache_open(&caches, each);
        turn(each, 100, true);
        size_t more = room(each) - classes.of[each].max_cached;
        CHECK(room(each) <= classes.of[each].max_grown);
        grown_bytes += more * classes.of[each].size;
    }
    CHECK(grown_bytes <= MAX_GROWN_BYTES && grown_bytes > MAX_GROWN_BYTES / 2);
}

/* Each stack of the caller's cache has words that no other has; and so is the word below it. */
static void check_rooms(void) {
    const struct cpu_cache_state *state = &caches.states[cpu_cache_number(&caches)];
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        size_t below = (size_t)state->start[size_class] - 1;
        CHECK(state->start[size_class] == 0 || below >= 3 * SIZE_CLASSES);
        for (uint32_t other = 1; other < classes.count && state->start[size_class] != 0; ++other) {
            size_t room = state->moved[other] ? classes.of[other].max_grown : classes.of[other].max_cached;
            CHECK(state->start[other] == 0 || below - state->start[other] >= room);
        }
    }
}

/* A stack that grows for the first time moves, with what is in it. */
static void check_move(void) {
    const uint32_t size_class = 6;
    cpu_cache_open(&caches, size_class);
    CHECK(push_one(size_class, token(0))); /* an empty cache is left as it is */
    for (unsigned number = 0; number < caches.count; number++) {
        cpu_cache_flush(&caches, number, false, count_blocks, NULL);
    }
    cpu_cache_open(&caches, size_class);
    size_t count = 0;
    while (push_one(size_class, token(count))) {
        count++;
    }
    CHECK_EQUAL(count, classes.of[size_class].max_cached);
    size_t bytes;
    size_t held = cpu_caches_blocks(&caches, &bytes);
    size_t held_bytes = bytes;
    turn(size_class, GROWTH_TURNS, true);
    CHECK_EQUAL(cpu_caches_blocks(&caches, &bytes), held);
    CHECK_EQUAL(bytes, held_bytes);
    CHECK(caches.states[cpu_cache_number(&caches)].moved[size_class]);
    for (uint32_t other = 1; other < 12; other++) {
        cpu_cache_open(&caches, other);
    }
    check_rooms();
    CHECK(push_one(size_class, token(count)));
    void *block;
    for (size_t i = count + 1; i-- > 0;) {
        CHECK(pop_one(size_class, &block) && block == token(i));
    }
    CHECK(!pop_one(size_class, &block));
}

/* The class's batch; half of what there is room for, if that is more. */
static void check_magazine(uint32_t size_class) {
    size_t batch = classes.of[size_class].batch;
    size_t half = room(size_class) / 2 < MAX_MAGAZINE_BLOCKS ? room(size_class) / 2 : MAX_MAGAZINE_BLOCKS - 1;
    CHECK_EQUAL(cpu_cache_magazine(&caches, size_class), half > batch ? half : batch);
}

static void check_magazines(void) {
    size_t more = 0;
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        cpu_cache_open(&caches, size_class);
        CHECK(push_one(size_class, token(0))); /* an empty cache is left as it is */
        for (unsigned number = 0; number < caches.count; number++) {
            cpu_cache_flush(&caches, number, false, count_blocks, NULL);
        }
        CHECK_EQUAL(cpu_cache_magazine(&caches, size_class), classes.of[size_class].batch); /* without room */
        cpu_cache_open(&caches, size_class);
        check_magazine(size_class);
        size_t before = cpu_cache_magazine(&caches, size_class);
        turn(size_class, 100, true);
        check_magazine(size_class);
        more += cpu_cache_magazine(&caches, size_class) > before;
    }
    CHECK(more > 8);
}

/* Each stack holds exactly what its class may, the last in is the first out, and closed is closed. */
static void check_stacks(void) {
    void *blocks[MAX_CACHE_BLOCKS + 10];
    void *back[MAX_CACHE_BLOCKS + 10];
    for (size_t i = 0; i < MAX_CACHE_BLOCKS + 10; i++) {
        blocks[i] = token(i);
    }
    CHECK_EQUAL(cpu_cache_push_some(&caches, 1, blocks, 1), 0); /* not open yet */
    CHECK_EQUAL(cpu_cache_pop_some(&caches, 1, back, 1), 0);
    size_t total = 0;
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        size_t most = classes.of[size_class].max_cached;
        CHECK_EQUAL(cpu_cache_push_some(&caches, size_class, blocks, 1), 0); /* without room */
        CHECK(cpu_cache_open(&caches, size_class));
        CHECK(!cpu_cache_open(&caches, size_class));
        CHECK_EQUAL(cpu_cache_pop_some(&caches, size_class, back, 3), 0);
        CHECK_EQUAL(cpu_cache_push_some(&caches, size_class, blocks, most + 5), most);
        CHECK_EQUAL(cpu_cache_push_some(&caches, size_class, blocks, 1), 0);
        CHECK(!push_one(size_class, blocks[0]));
        CHECK(pop_one(size_class, &back[0]) && back[0] == blocks[most - 1]);
        CHECK(push_one(size_class, back[0]));
        CHECK_EQUAL(cpu_cache_pop_some(&caches, size_class, back, most + 5), most);
        CHECK(memcmp(back, blocks, most * sizeof *back) == 0);
        CHECK_EQUAL(cpu_cache_push_some(&caches, size_class, blocks, most / 2), most / 2);
        total += most / 2;
    }
    CHECK(!push_one(0, blocks[0])); /* class 0 is that of what has no class */
    CHECK(!pop_one(0, &back[0]));
    size_t bytes;
    CHECK_EQUAL(cpu_caches_blocks(&caches, &bytes), total);
    /* Used until just now: the first check notes its digest, and it is idle after some that find the same. */
    for (unsigned checks = 0; counted == 0; checks++) {
        CHECK(checks <= CACHE_IDLE_CHECKS);
        for (unsigned number = 0; number < caches.count; number++) {
            cpu_cache_flush(&caches, number, true, count_blocks, NULL);
        }
        CHECK(checks == CACHE_IDLE_CHECKS || counted == 0);
    }
    CHECK_EQUAL(counted, total);
    CHECK_EQUAL(cpu_caches_blocks(&caches, &bytes) + bytes, 0);
    CHECK_EQUAL(cpu_cache_push_some(&caches, 1, blocks, 1), 0); /* without room again */
    CHECK(cpu_cache_open(&caches, 1));
    CHECK_EQUAL(cpu_cache_push_some(&caches, 1, blocks, 1), 1);
    CHECK_EQUAL(cpu_cache_pop_some(&caches, 1, back, 1), 1);
    check_magazines();
    check_growth();
    check_move();
}

/* A push compares with the newest; below a stack's bottom lies nobody's. */
static void check_newest(void) {
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        void *block;
        cpu_cache_open(&caches, size_class);
        CHECK(!cpu_cache_is_newest(&caches, size_class, token(0)));
        CHECK(push_one(size_class, token(0)));
        CHECK(!push_one(size_class, token(0)));
        CHECK(push_one(size_class, token(1)));
        CHECK(!push_one(size_class, token(1)));
        CHECK(cpu_cache_is_newest(&caches, size_class, token(1)) &&
              !cpu_cache_is_newest(&caches, size_class, token(0)));
        CHECK(pop_one(size_class, &block) && block == token(1));
        CHECK(pop_one(size_class, &block) && block == token(0));
        CHECK(!cpu_cache_is_newest(&caches, size_class, token(0)) &&
              !cpu_cache_is_newest(&caches, size_class, token(1)));
    }
    CHECK(!cpu_cache_is_newest(&caches, 0, token(0)));
    check_rooms();
}

static void flush_all(void) {
    for (unsigned number = 0; number < caches.count; number++) {
        cpu_cache_flush(&caches, number, false, count_blocks, NULL);
    }
}

/* After a flush, other classes get the room of a stack that was full. A word that is then below a bottom had
 * a block, which may be in use again and be freed. */
static void check_room_of_others(void) {
    enum { FIRST = 1, SECOND = 30, THIRD = 3 };
    cpu_cache_open(&caches, FIRST);
    CHECK(push_one(FIRST, token(0))); /* an empty cache is left as it is */
    flush_all();
    const struct cpu_cache_state *state = &caches.states[cpu_cache_number(&caches)];
    cpu_cache_open(&caches, FIRST);
    CHECK_EQUAL(state->start[SECOND], 0);
    size_t start = state->start[FIRST];
    size_t count = 0;
    while (push_one(FIRST, token(count))) {
        count++;
    }
    flush_all();
    CHECK_EQUAL(state->start[FIRST], 0);
    void *block;
    CHECK(!pop_one(FIRST, &block) && !push_one(FIRST, token(0)));
    cpu_cache_open(&caches, SECOND);
    cpu_cache_open(&caches, THIRD);
    CHECK_EQUAL(state->start[SECOND], start);
    size_t below = state->start[THIRD] - 1 - start;
    CHECK(below < count);
    CHECK(!cpu_cache_is_newest(&caches, THIRD, token(below)));
    CHECK(push_one(THIRD, token(below)));
    CHECK(pop_one(THIRD, &block) && block == token(below));
}

/* A sequence reads a stack's bottom or end, another thread opens the cache for the first time, and the
 * sequence reads the top. */
static void check_half_opened(void) {
    enum { CLASS = 2 };
    void *block = token(4);
    cpu_cache_open(&caches, CLASS);
    CHECK_EQUAL(cpu_cache_push_some(&caches, CLASS, &block, 1), 1);
    char *cache = caches.base + ((size_t)cpu_cache_number(&caches) << CPU_CACHE_SHIFT);
    struct stack *stack = stack_of(cache, CLASS);
    uintptr_t not_bottom = atomic_exchange(&stack->not_bottom, 0);
    void **end = atomic_exchange(&stack->end, NULL);
    CHECK(!pop_one(CLASS, &block) && cpu_cache_pop_some(&caches, CLASS, &block, 1) == 0);
    CHECK(!push_one(CLASS, token(5)) && cpu_cache_push_some(&caches, CLASS, &block, 1) == 0);
    atomic_store(&stack->not_bottom, not_bottom);
    atomic_store(&stack->end, end);
    CHECK(pop_one(CLASS, &block) && block == token(4));
}

static void stay_on_one_cpu(void) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
}

static void check_stacks_rseq(void) {
    stay_on_one_cpu();
    CHECK(cpu_caches_init(&caches, &classes, rseq_find()));
    cpu_caches_start(&caches, CACHE_RSEQ);
    check_stacks();
}

static void check_newest_rseq(void) {
    stay_on_one_cpu();
    CHECK(cpu_caches_init(&caches, &classes, rseq_find()));
    cpu_caches_start(&caches, CACHE_RSEQ);
    check_half_opened();
    check_newest();
    check_room_of_others();
}

/* One block at a time, as among threads, and with a helper. */
static void check_one_block_locked(void) {
    void *block = NULL;
    CHECK(!cpu_cache_is_single_threaded(&caches) ||
          (!locked_push(&caches, 7, token(7)) && !locked_pop(&caches, 7, &block)));
    cpu_caches_set_helper(&caches, true);
    CHECK(!locked_push(&caches, 7, token(7)) && !locked_pop(&caches, 7, &block)); /* not open */
    CHECK(cpu_cache_open(&caches, 7));
    CHECK(!locked_pop(&caches, 7, &block));
    CHECK(locked_push(&caches, 7, token(7)));
    CHECK(!locked_push(&caches, 7, token(7))); /* freed before */
    size_t pushed = 1;
    while (locked_push(&caches, 7, token(pushed % 2 == 1 ? 4 : 7))) {
        pushed++;
    }
    CHECK_EQUAL(pushed, classes.of[7].max_cached);
    CHECK(!cpu_caches_are_held(&caches));
    for (; pushed > 0; pushed--) {
        CHECK(locked_pop(&caches, 7, &block) && block == token(pushed % 2 == 1 ? 7 : 4));
    }
    CHECK(!locked_pop(&caches, 7, &block) && !cpu_caches_are_held(&caches));
    cpu_caches_set_helper(&caches, false);
}

static void check_stacks_locked(void) {
    CHECK(cpu_caches_init(&caches, &classes, (struct rseq_offsets){0}));
    cpu_caches_start(&caches, CACHE_LOCKED);
    check_stacks();
    check_half_opened();
    if (cpu_cache_is_single_threaded(&caches)) {
        void *block;
        cpu_cache_open(&caches, 3);
        CHECK(unlocked_push(&caches, 3, token(3)));
        CHECK(!unlocked_push(&caches, 3, token(3)));
        CHECK(cpu_cache_is_newest(&caches, 3, token(3)));
        CHECK(unlocked_pop(&caches, 3, &block) && block == token(3));
        CHECK(!unlocked_pop(&caches, 3, &block));
    }
    check_room_of_others();
    in_child(check_one_block_locked);
}

static void *hold_all_locks(void *unused) {
    for (unsigned number = 0; number < caches.count; number++) {
        lock_lose(&caches.states[number].lock);
    }
    return unused;
}

/* A fork that may not wait for a thread that holds every lock: the parent's stay held, and in the child all
 * caches are usable, those that were open empty; those that never were are not writable. */
static void check_fork_beside_a_holder(void) {
    pthread_t holder;
    void *block = token(1);
    CHECK(cpu_caches_init(&caches, &classes, (struct rseq_offsets){0}));
    cpu_caches_start(&caches, CACHE_LOCKED);
    CHECK(caches.count > 1 && cpu_cache_open(&caches, 1));
    CHECK_EQUAL(cpu_cache_push_some(&caches, 1, &block, 1), 1);
    CHECK(pthread_create(&holder, NULL, hold_all_locks, NULL) == 0);
    CHECK(pthread_join(holder, NULL) == 0);
    cpu_caches_before_fork(&caches, false);
    cpu_caches_after_fork(&caches, false);
    for (unsigned number = 0; number < caches.count; number++) {
        CHECK(atomic_load(&caches.states[number].lock.state) != LOCK_FREE);
    }
    cpu_caches_before_fork(&caches, false);
    cpu_caches_after_fork(&caches, true);
    for (unsigned number = 0; number < caches.count; number++) {
        CHECK_EQUAL(atomic_load(&caches.states[number].lock.state), LOCK_FREE);
    }
    CHECK_EQUAL(cpu_cache_pop_some(&caches, 1, &block, 1) + cpu_cache_push_some(&caches, 1, &block, 1), 0);
    CHECK(cpu_cache_open(&caches, 1));
    CHECK_EQUAL(cpu_cache_push_some(&caches, 1, &block, 1), 1);
    CHECK_EQUAL(cpu_cache_pop_some(&caches, 1, &block, 1), 1);
    CHECK(block == token(1));
}

static void check_off(void) {
    void *block = token(0);
    CHECK(!cpu_cache_is_rseq(&caches));
    CHECK_EQUAL(cpu_cache_push_some(&caches, 1, &block, 1) + cpu_cache_pop_some(&caches, 1, &block, 1), 0);
    CHECK(cpu_caches_init(&caches, &classes, (struct rseq_offsets){0}));
    CHECK_EQUAL(cpu_cache_push_some(&caches, 1, &block, 1) + cpu_cache_pop_some(&caches, 1, &block, 1), 0);
    cpu_caches_start(&caches, CACHE_OFF);
    CHECK_EQUAL(cpu_cache_push_some(&caches, 1, &block, 1) + cpu_cache_pop_some(&caches, 1, &block, 1), 0);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    seed = check_seed(1);
    enough_operations = check_rounds(enough_operations);
    size_classes_fill(&classes, vm_page_size());
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    threads = (size_t)CPU_COUNT(&allowed) * 3;
    threads = threads < 6 ? 6 : threads > MAX_THREADS - 1 ? MAX_THREADS - 1 : threads;

    in_child(check_off);
    in_child(check_stacks_locked);
    in_child(check_fork_beside_a_holder);
    in_child(run_locked);
    if (!rseq_find().usable) {
        puts("no restartable sequences");
        return 0;
    }
    in_child(check_stacks_rseq);
    in_child(check_newest_rseq);
    in_child(run_rseq);
    in_child(run_rseq_by_cpu);
    return 0;
}
