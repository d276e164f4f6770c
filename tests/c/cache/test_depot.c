/* The depot compared with a model: each block put in comes out once, within the limits, with one thread and
 * with many. */
#include "cache/depot.h"

#include <pthread.h>
#include <string.h>

#include "check.h"
#include "lost_lock.h"

#define MAX_SMALL  ((size_t)600 << 10)
#define MEDIUM     ((size_t)400 << 10)
#define MAX_MEDIUM ((size_t)8000 << 10)
#define TOKENS     60000
#define THREADS    6
#define CLASSES    6

static const uint32_t some_classes[CLASSES] = {1, 2, 9, 20, 40, 72};

static struct size_classes classes;
static struct depot depot;
static size_t rounds = 40000;
static uint64_t seed;

/* A token is no memory: only its number counts, and its class by it. */
static _Atomic(int) place_of[TOKENS]; /* 0: in the depot; else who has it */

static void *token(size_t number) {
    return (void *)((number + 1) * 16);
}

static size_t number_of(const void *token) {
    size_t number = (size_t)token / 16 - 1;
    CHECK(number < TOKENS);
    return number;
}

static uint32_t class_of(size_t number) {
    return some_classes[number % CLASSES];
}

static void start_depot(void) {
    memset(&depot, 0, sizeof depot);
    CHECK(depot_init(&depot, &classes, DEPOT_BIN_BLOCKS, MAX_SMALL, MEDIUM, MAX_MEDIUM));
}

static size_t bin_count(uint32_t size_class) {
    return atomic_load(&depot.bins[size_class].count);
}

static bool is_medium(uint32_t size_class) {
    return classes.of[size_class].size >= MIN_MEDIUM_SIZE;
}

static size_t charge_of_bins(bool medium) {
    size_t charge = 0;
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        if (is_medium(size_class) == medium) {
            charge += depot_charge(&depot, size_class, bin_count(size_class)) +
                      atomic_load(&depot.bins[size_class].credit);
        }
    }
    return charge;
}

static size_t charge(bool medium) {
    return atomic_load(medium ? &depot.medium.charge : &depot.small.charge);
}

static void check_charges(void) {
    CHECK_EQUAL(charge(false), charge_of_bins(false));
    CHECK_EQUAL(charge(true), charge_of_bins(true));
}

static size_t bound(void) {
    return atomic_load(&depot.medium.bound);
}

/* ---- one thread ---- */

struct flushed {
    void **expected; /* in any order between classes; of one class from the bottom */
    size_t count;
};

static void expect_flush(void *context, void *const *blocks, size_t count) {
    struct flushed *flushed = context;
    CHECK(count > 0);
    memcpy(flushed->expected + flushed->count, blocks, count * sizeof *blocks);
    flushed->count += count;
}

/* Flushes, and returns how many blocks left. */
static size_t count_flushed(struct depot *from, bool all, put_flushed *put, void *context) {
    size_t bytes;
    size_t before = depot_blocks(from, &bytes);
    depot_flush(from, all, put, context);
    return before - depot_blocks(from, &bytes);
}

static void test_charge(void) {
    start_depot();
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        size_t size = classes.of[size_class].size;
        CHECK_EQUAL(depot_charge(&depot, size_class, 7),
                    7 * (size < MIN_DEPOT_CHARGE ? MIN_DEPOT_CHARGE : size));
    }
    CHECK_EQUAL(depot_charge(&depot, 1, 0), 0);
}

/* Magazines of one class up to the bound: all of one or none, and the last in comes out first. */
static void test_fills_up(uint32_t size_class) {
    static void *magazine[MAX_MAGAZINE_BLOCKS];
    static void *back[MAX_MAGAZINE_BLOCKS];
    start_depot();
    size_t batch = classes.of[size_class].batch;
    size_t held = 0;
    CHECK_EQUAL(depot_take(&depot, size_class, back, batch), 0);
    for (;;) {
        for (size_t i = 0; i < batch; i++) {
            magazine[i] = token(held + i);
        }
        if (!depot_put(&depot, size_class, magazine, batch)) {
            break;
        }
        held += batch;
        CHECK_EQUAL(bin_count(size_class), held);
        CHECK_EQUAL(charge(is_medium(size_class)), depot_charge(&depot, size_class, held));
    }
    CHECK(held <= DEPOT_BIN_BLOCKS &&
          depot_charge(&depot, size_class, held) <= (is_medium(size_class) ? MEDIUM : MAX_SMALL));
    CHECK_EQUAL(bin_count(size_class), held); /* the refused left no trace */
    CHECK_EQUAL(charge(is_medium(size_class)), depot_charge(&depot, size_class, held));
    CHECK_EQUAL(charge(!is_medium(size_class)), 0);
    size_t bytes;
    CHECK_EQUAL(depot_blocks(&depot, &bytes), held);
    CHECK_EQUAL(bytes, held * classes.of[size_class].size);
    while (held > 0) {
        size_t taken = depot_take(&depot, size_class, back, batch);
        CHECK_EQUAL(taken, batch < held ? batch : held);
        held -= taken;
        for (size_t i = 0; i < taken; i++) {
            CHECK(back[i] == token(held + i));
        }
    }
    check_charges();
    struct flushed nothing = {NULL, 0};
    CHECK_EQUAL(count_flushed(&depot, false, expect_flush, &nothing), 0);
    CHECK_EQUAL(charge(is_medium(size_class)), 0); /* no credit outlives a check */
}

/* What has lain there since the last time goes, from the bottom; what was put meanwhile stays. */
static void test_flush(void) {
    static void *blocks[600];
    static void *got[600];
    start_depot();
    for (size_t i = 0; i < 600; i++) {
        blocks[i] = token(i);
    }
    CHECK(depot_put(&depot, 1, blocks, 300));
    struct flushed flushed = {got, 0};
    CHECK_EQUAL(count_flushed(&depot, false, expect_flush, &flushed), 0); /* just come */
    CHECK(depot_put(&depot, 1, blocks + 300, 100));
    CHECK_EQUAL(depot_take(&depot, 1, got, 150), 150); /* 250 left: 250 nobody wanted */
    CHECK(depot_put(&depot, 1, blocks + 400, 200));
    CHECK_EQUAL(count_flushed(&depot, false, expect_flush, &flushed), 250);
    CHECK_EQUAL(flushed.count, 250);
    for (size_t i = 0; i < 250; i++) {
        CHECK(got[i] == blocks[i]);
    }
    CHECK_EQUAL(bin_count(1), 200);
    check_charges();
    flushed.count = 0;
    CHECK(depot_put(&depot, 9, blocks, 10));
    CHECK_EQUAL(count_flushed(&depot, true, expect_flush, &flushed), 210);
    CHECK_EQUAL(charge(false) + charge(true), 0);
    CHECK_EQUAL(count_flushed(&depot, true, expect_flush, &flushed), 0);
}

static void fill(uint32_t size_class) {
    static void *magazine[MAX_MAGAZINE_BLOCKS];
    size_t batch = classes.of[size_class].batch;
    for (size_t i = 0; i < batch; i++) {
        magazine[i] = token(i);
    }
    while (depot_put(&depot, size_class, magazine, batch)) {
    }
}

/* Full, refused, asked to grow, and empty, so many times. Returns the most that the bin held. */
static size_t turn(uint32_t size_class, size_t turns) {
    static void *magazine[MAX_MAGAZINE_BLOCKS];
    size_t batch = classes.of[size_class].batch;
    size_t most = 0;
    while (turns-- > 0) {
        fill(size_class);
        most = bin_count(size_class) > most ? bin_count(size_class) : most;
        depot_grow(&depot, size_class);
        while (depot_take(&depot, size_class, magazine, batch) > 0) {
        }
    }
    return most;
}

/* However many blocks of one class come, there is room for another's. */
static void test_leaves_room(uint32_t one, uint32_t other) {
    start_depot();
    size_t room = is_medium(one) ? MEDIUM : MAX_SMALL;
    fill(one);
    fill(other);
    CHECK(depot_charge(&depot, one, bin_count(one)) > room / 2);
    CHECK(depot_charge(&depot, other, bin_count(other)) > room / 8);
    check_charges();
}

static void put_nowhere(void *context, void *const *blocks, size_t count) {
    (void)context;
    (void)blocks;
    (void)count;
}

/* Only what comes and goes in turn makes the bound grow, and only for medium blocks. */
static void test_grows(void) {
    const uint32_t small = 20;
    const uint32_t medium = 40;
    start_depot();
    size_t at_first = turn(medium, 1);
    for (int i = 0; i < 100; i++) {
        fill(medium);
        depot_grow(&depot, medium); /* full, and never empty */
    }
    CHECK_EQUAL(bound(), MEDIUM);
    (void)turn(small, 100);
    CHECK_EQUAL(bound(), MEDIUM);
    CHECK_EQUAL(atomic_load(&depot.small.bound), MAX_SMALL);
    size_t grown = turn(medium, 200);
    CHECK_EQUAL(bound(), MAX_MEDIUM);
    CHECK(grown > at_first);
    depot_flush(&depot, false, put_nowhere, NULL);
    CHECK_EQUAL(bound(), MAX_MEDIUM); /* all was wanted */

    /* It falls by what was not, and no lower than it was at first. */
    void *four[4] = {token(0), token(1), token(2), token(3)};
    CHECK(depot_put(&depot, medium, four, 4));
    depot_flush(&depot, false, put_nowhere, NULL);
    CHECK_EQUAL(count_flushed(&depot, false, put_nowhere, NULL), 4);
    CHECK_EQUAL(bound(), MAX_MEDIUM - depot_charge(&depot, medium, 4));
    for (int i = 0; i < 100; i++) {
        fill(medium);
        depot_flush(&depot, true, put_nowhere, NULL);
    }
    CHECK_EQUAL(bound(), MEDIUM);

    /* Turns that are few between two checks are none. */
    for (int i = 0; i < 100; i++) {
        (void)turn(medium, 3);
        depot_flush(&depot, false, put_nowhere, NULL);
    }
    CHECK_EQUAL(bound(), MEDIUM);
    check_charges();
    size_t bytes;
    CHECK_EQUAL(depot_max_blocks(&depot, &bytes),
                MAX_SMALL / MIN_DEPOT_CHARGE + MAX_MEDIUM / MIN_MEDIUM_SIZE);
    CHECK_EQUAL(bytes, MAX_SMALL + MAX_MEDIUM);
}

/* One for which there was no memory takes nothing, and hurts nobody. */
static void test_none(void) {
    struct depot none = {0};
    void *block = token(0);
    size_t bytes;
    CHECK(!depot_put(&none, 1, &block, 1));
    depot_grow(&none, 1);
    CHECK_EQUAL(depot_take(&none, 1, &block, 1), 0);
    CHECK_EQUAL(count_flushed(&none, true, expect_flush, NULL), 0);
    CHECK_EQUAL(depot_blocks(&none, &bytes) + bytes, 0);
    depot_before_fork(&none, true);
    depot_after_fork(&none, false);
}

static void *hold_a_bin(void *size_class) {
    lock_lose(&depot.bins[(uintptr_t)size_class].lock);
    return NULL;
}

/* A fork that may not wait for a thread that holds a bin: that bin is empty in the child, the others are
 * whole. */
static void test_fork_beside_a_holder(void) {
    pthread_t holder;
    void *block = token(1);
    start_depot();
    CHECK(depot_put(&depot, 1, &block, 1) && depot_put(&depot, 2, &block, 1));
    CHECK(pthread_create(&holder, NULL, hold_a_bin, (void *)1) == 0);
    CHECK(pthread_join(holder, NULL) == 0);
    depot_before_fork(&depot, false);
    depot_after_fork(&depot, false);
    CHECK(bin_count(1) == 1 && atomic_load(&depot.bins[1].lock.state) != LOCK_FREE);
    depot_before_fork(&depot, false);
    depot_after_fork(&depot, true);
    CHECK_EQUAL(bin_count(1), 0);
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        CHECK_EQUAL(atomic_load(&depot.bins[size_class].lock.state), LOCK_FREE);
    }
    CHECK_EQUAL(depot_take(&depot, 2, &block, 1), 1);
    CHECK(depot_put(&depot, 1, &block, 1));
    CHECK_EQUAL(depot_take(&depot, 1, &block, 1), 1);
}

static void test_one_thread(void) {
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        test_fills_up(size_class);
    }
    test_flush();
    test_grows();
    test_leaves_room(10, 20);
    test_leaves_room(40, 41);
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        CHECK_EQUAL(atomic_load(&depot.bins[size_class].lock.state), LOCK_FREE);
    }
}

/* ---- many threads ---- */

struct owner {
    pthread_t thread;
    uint64_t random;
    int name;
    size_t count[CLASSES];
    void *stash[CLASSES][TOKENS];
    size_t puts, refusals, takes;
};

static struct owner owners[THREADS];
static _Atomic(bool) stop;

static void own(struct owner *owner, size_t kind, void *const *tokens, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t number = number_of(tokens[i]);
        CHECK_EQUAL(class_of(number), some_classes[kind]);
        CHECK_EQUAL(atomic_exchange(&place_of[number], owner->name), 0);
        owner->stash[kind][owner->count[kind]++] = tokens[i];
    }
}

static void disown(struct owner *owner, size_t kind, size_t count) {
    void **last = &owner->stash[kind][owner->count[kind] - count];
    for (size_t i = 0; i < count; i++) {
        CHECK_EQUAL(atomic_exchange(&place_of[number_of(last[i])], 0), owner->name);
    }
    if (depot_put(&depot, some_classes[kind], last, count)) {
        owner->count[kind] -= count;
        owner->puts++;
        return;
    }
    owner->refusals++;
    depot_grow(&depot, some_classes[kind]);
    for (size_t i = 0; i < count; i++) {
        CHECK_EQUAL(atomic_exchange(&place_of[number_of(last[i])], owner->name), 0);
    }
}

static void *exchange(void *argument) {
    struct owner *owner = argument;
    void *tokens[MAX_MAGAZINE_BLOCKS];
    for (size_t round = 0; round < rounds; round++) {
        size_t kind = check_random(&owner->random) % CLASSES;
        size_t count = 1 + check_random(&owner->random) % (MAX_MAGAZINE_BLOCKS - 1);
        if (check_random(&owner->random) % 2 == 0 && owner->count[kind] >= count) {
            disown(owner, kind, count);
        } else {
            size_t taken = depot_take(&depot, some_classes[kind], tokens, count);
            owner->takes += taken > 0;
            own(owner, kind, tokens, taken);
        }
    }
    return NULL;
}

static void own_flushed(void *context, void *const *blocks, size_t count) {
    for (size_t i = 0; i < count; i++) {
        own(context, number_of(blocks[i]) % CLASSES, &blocks[i], 1);
    }
}

/* Flushes all the while, and puts back what it got. */
static void *flush_and_return(void *argument) {
    struct owner *owner = argument;
    while (!atomic_load(&stop)) {
        depot_flush(&depot, check_random(&owner->random) % 4 == 0, own_flushed, owner);
        for (size_t kind = 0; kind < CLASSES; kind++) {
            while (owner->count[kind] > 0) {
                size_t before = owner->count[kind];
                disown(owner, kind, before < 40 ? before : 40);
                if (owner->count[kind] == before) {
                    break;
                }
            }
        }
        size_t bytes;
        depot_blocks(&depot, &bytes);
        if (check_random(&owner->random) % 8 == 0) {
            depot_before_fork(&depot, true);
            CHECK(charge_of_bins(false) <= MAX_SMALL);
            CHECK(charge_of_bins(true) <= MAX_MEDIUM);
            CHECK(bound() >= MEDIUM && bound() <= MAX_MEDIUM);
            depot_after_fork(&depot, false);
        }
    }
    return NULL;
}

static void test_many_threads(void) {
    static bool found[TOKENS];
    start_depot();
    for (size_t i = 0; i < THREADS; i++) {
        owners[i].name = (int)i + 1;
        owners[i].random = i * 7919 + seed;
    }
    for (size_t i = 0; i < TOKENS; i++) {
        void *one = token(i);
        own(&owners[i / 64 % (THREADS - 1)], i % CLASSES, &one, 1);
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&owners[i].thread, NULL, i < THREADS - 1 ? exchange : flush_and_return,
                             &owners[i]) == 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        if (i == THREADS - 1) {
            atomic_store(&stop, true);
        }
        CHECK(pthread_join(owners[i].thread, NULL) == 0);
    }
    check_charges();
    depot_flush(&depot, true, own_flushed, &owners[0]);
    CHECK_EQUAL(charge(false) + charge(true), 0);
    size_t total = 0;
    size_t puts = 0;
    size_t refusals = 0;
    for (size_t i = 0; i < THREADS; i++) {
        puts += owners[i].puts;
        refusals += owners[i].refusals;
        for (size_t kind = 0; kind < CLASSES; kind++) {
            for (size_t j = 0; j < owners[i].count[kind]; j++) {
                size_t number = number_of(owners[i].stash[kind][j]);
                CHECK(!found[number]);
                found[number] = true;
                total++;
            }
        }
    }
    CHECK_EQUAL(total, TOKENS);
    printf("%zu magazines put, %zu refused\n", puts, refusals);
    CHECK(puts > rounds / 100 && refusals > 0);
}

int main(void) {
    seed = check_seed(1);
    rounds = check_rounds(rounds);
    size_classes_fill(&classes, 4096);
    test_charge();
    test_one_thread();
    test_none();
    test_fork_beside_a_holder();
    test_many_threads();
    return 0;
}
