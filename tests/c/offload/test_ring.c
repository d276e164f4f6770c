/*
 * The ring: records come out once, in order, each complete or not at all; at any position, of any length,
 * with one thread and with two.
 */
#include "offload/ring.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "base/size_class.h"
#include "check.h"

#define MAX_PAYLOAD MAX_MAGAZINE_BLOCKS

static struct ring ring;
static uint32_t records = 200000;
static uint64_t seed;

/* As if so many words had passed through it. */
static void start_at(uint32_t index) {
    memset(&ring, 0xa5, sizeof ring);
    atomic_store(&ring.head, index);
    atomic_store(&ring.tail, index);
    ring.head_seen = index;
    ring.tail_seen = index;
}

/* ---- records that say themselves what is in them ---- */

static uint64_t header_of(uint32_t number, size_t count) {
    return (uint64_t)count << 32 | number;
}

static uint64_t word_of(uint32_t number, size_t place) {
    return ((uint64_t)number + 1) * 0x9e3779b97f4a7c15ULL + place * 0xc2b2ae3d27d4eb4fULL;
}

static bool push(uint32_t number, size_t count, bool sequenced) {
    uint64_t payload[MAX_PAYLOAD];
    for (size_t i = 0; i < count; i++) {
        payload[i] = word_of(number, i);
    }
    return ring_push(&ring, header_of(number, count), count == 0 ? NULL : payload, sequenced);
}

/* Takes the next record, as the server does. Returns its length. */
static size_t pull(uint32_t number) {
    uint64_t payload[MAX_PAYLOAD];
    uint64_t header = ring_pop(&ring, payload);
    CHECK_EQUAL((uint32_t)header, number);
    size_t count = header >> 32;
    CHECK(count <= MAX_PAYLOAD);
    for (size_t i = 0; i < count; i++) {
        CHECK_EQUAL(payload[i], word_of(number, i));
    }
    return count;
}

static void expect_empty(void) {
    CHECK_EQUAL(ring_filled(&ring), 0);
    CHECK(ring_is_empty(&ring));
}

/* ---- one thread ---- */

static void test_zero_is_empty(void) {
    memset(&ring, 0, sizeof ring);
    expect_empty();
    CHECK(push(0, 3, false));
    CHECK_EQUAL(ring_filled(&ring), 4);
    CHECK_EQUAL(pull(0), 3);
    expect_empty();
}

/* Each length at each place around the end of the words, where the indices' own end is, too. */
static void test_every_length_across_the_end(uint32_t end) {
    for (size_t count = 0; count <= MAX_PAYLOAD; count++) {
        for (uint32_t before = 0; before <= count + 1; before++) {
            start_at(end - before);
            CHECK(push(7, count, before % 2 == 0));
            CHECK_EQUAL(ring_filled(&ring), count + 1);
            CHECK_EQUAL(pull(7), count);
            expect_empty();
        }
    }
}

/* What does not fit leaves no trace; the last word does. */
static void test_whole_or_not_at_all(void) {
    for (size_t count = 0; count <= MAX_PAYLOAD; count++) {
        start_at(UINT32_MAX - (uint32_t)(count * 37));
        uint32_t pushed = 0;
        size_t left = RING_WORDS;
        for (; left >= count + 1; left -= count + 1) {
            CHECK(push(pushed++, count, false));
        }
        CHECK(!push(pushed, count, false));
        CHECK(!push(pushed, count, true));
        CHECK_EQUAL(ring_filled(&ring), RING_WORDS - left);
        if (left > 0) {
            CHECK(push(pushed++, left - 1, false));
        }
        /* Those that it saw before, until it has taken these. */
        CHECK_EQUAL(ring_filled(&ring), RING_WORDS - left);
        CHECK_EQUAL(atomic_load(&ring.tail) - atomic_load(&ring.head), RING_WORDS);
        CHECK(!push(pushed, 0, false));
        /* Room for what was taken, and no more. */
        size_t room = pull(0) + 1;
        CHECK(room > MAX_PAYLOAD || !push(pushed, room, false));
        CHECK(push(pushed++, room - 1, false));
        for (uint32_t number = 1; number < pushed; number++) {
            CHECK(ring_filled(&ring) > 0);
            pull(number);
        }
        expect_empty();
    }
}

/* A record is taken alone, and whole. */
static void test_one_at_a_time(void) {
    start_at(UINT32_MAX - 2);
    CHECK(push(1, 5, false));
    CHECK(push(2, 6, false));
    CHECK_EQUAL(ring_filled(&ring), 13);
    CHECK_EQUAL(pull(1), 5);
    CHECK_EQUAL(ring_filled(&ring), 7);
    CHECK_EQUAL(pull(2), 6);
    expect_empty();
}

/* ---- two threads ---- */

struct sums {
    uint64_t words;
    uint64_t sum;
};

static void add(struct sums *sums, uint32_t number, size_t count) {
    sums->words += count + 1;
    sums->sum = sums->sum * 31 + header_of(number, count);
}

static void *produce(void *argument) {
    struct sums *sums = argument;
    uint64_t random = seed * 4711;
    for (uint32_t number = 0; number < records; number++) {
        size_t count = check_random(&random) % (MAX_PAYLOAD + 1);
        count = number / 1000 % 2 == 0 ? count : count % 4;
        while (!push(number, count, number % 3 == 0)) {
            sched_yield();
        }
        add(sums, number, count);
    }
    return NULL;
}

/* Long enough without a look that the ring fills up, and often enough that it runs dry. */
static void consume(struct sums *sums) {
    uint64_t random = seed * 31337;
    for (uint32_t number = 0; number < records;) {
        bool empty = ring_is_empty(&ring);
        size_t filled = ring_filled(&ring);
        CHECK(filled <= RING_WORDS && (empty || filled > 0));
        if (filled == 0) {
            sched_yield();
        }
        /* All that was there at the look are whole records. */
        while (filled > 0) {
            size_t count = pull(number);
            CHECK(filled >= count + 1);
            filled -= count + 1;
            add(sums, number++, count);
        }
        if (number / 5000 % 2 == 0 && check_random(&random) % 16 == 0) {
            sched_yield();
        }
    }
}

static void test_two_threads(void) {
    start_at(UINT32_MAX - 10000);
    pthread_t producer;
    struct sums produced = {0};
    struct sums consumed = {0};
    CHECK(pthread_create(&producer, NULL, produce, &produced) == 0);
    consume(&consumed);
    CHECK(pthread_join(producer, NULL) == 0);
    CHECK_EQUAL(consumed.words, produced.words);
    CHECK_EQUAL(consumed.sum, produced.sum);
    CHECK(produced.words > 2 * RING_WORDS);
    expect_empty();
}

int main(void) {
    seed = check_seed(1);
    records = (uint32_t)check_rounds(records);
    test_zero_is_empty();
    test_every_length_across_the_end(RING_WORDS);
    test_every_length_across_the_end(0);
    test_whole_or_not_at_all();
    test_one_at_a_time();
    test_two_threads();
    return 0;
}
