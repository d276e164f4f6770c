/* Threads allocate blocks, write to the first bytes of each, and free them, in rounds of a fixed number. Each
 * thread frees its own blocks (--freed-by self), or those of the thread before it (next); or of two threads,
 * one allocates and the other frees (partner). A thread reads the first bytes of a block before it frees it.
 *
 * The work does not depend on time, and the main thread is one of the threads, so that 64 threads need 64
 * CPUs. For bench/lines, the program marks the rounds that count by system calls that do not exist (MARK_CALL
 * in research/papers/trace/record.h). */
#include "support.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MARK_CALL = 0x63616c6d, MARK_BEGIN = 4, MARK_END = 5, LINE = 64, SPINS = 100 };
enum freed_by { BY_SELF, BY_NEXT, BY_PARTNER };

static const char program_name[] = "exchange";

/* What a thread has; those of two threads share no cache line. */
struct side {
    _Alignas(LINE) uint64_t **blocks;
    unsigned long long random;
    /* The blocks that another thread is to free; NULL once it has. */
    _Alignas(LINE) _Atomic(uint64_t **) passed;
};

struct work {
    unsigned long threads;
    unsigned long least;
    unsigned long most;
    unsigned long blocks;
    unsigned long warm_up;
    unsigned long rounds;
    unsigned long freed_by;
    pthread_barrier_t barrier;
    struct side *sides;
};

struct member {
    struct work *work;
    unsigned long number;
};

static void mark(long kind) {
    (void)syscall(MARK_CALL, kind, 0L, 0L);
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

static void wait_until(struct side *side, bool is_passed) {
    for (unsigned spins = 0;
         (atomic_load_explicit(&side->passed, memory_order_acquire) != NULL) != is_passed;) {
        relax();
        if (++spins % SPINS == 0) {
            (void)sched_yield();
        }
    }
}

static void allocate_all(const struct work *work, struct side *side) {
    for (unsigned long i = 0; i < work->blocks; i++) {
        side->blocks[i] =
            checked(malloc(random_between(&side->random, work->least, work->most)), program_name);
        *side->blocks[i] = i;
    }
}

static void free_all(const struct work *work, uint64_t **blocks) {
    for (unsigned long i = 0; i < work->blocks; i++) {
        if (*blocks[i] != i) {
            fail(program_name, "a block does not hold what was written");
        }
        free(blocks[i]);
    }
}

static void pass_all(const struct work *work, struct side *side) {
    wait_until(side, false);
    allocate_all(work, side);
    atomic_store_explicit(&side->passed, side->blocks, memory_order_release);
}

static void free_passed(const struct work *work, struct side *from) {
    wait_until(from, true);
    free_all(work, atomic_load_explicit(&from->passed, memory_order_acquire));
    atomic_store_explicit(&from->passed, NULL, memory_order_release);
}

static void do_round(const struct work *work, unsigned long number) {
    struct side *side = &work->sides[number];
    if (work->freed_by == BY_SELF) {
        allocate_all(work, side);
        free_all(work, side->blocks);
    } else if (work->freed_by == BY_NEXT) {
        pass_all(work, side);
        free_passed(work, &work->sides[(number + work->threads - 1) % work->threads]);
    } else if (number % 2 == 0) {
        pass_all(work, side);
    } else {
        free_passed(work, &work->sides[number - 1]);
    }
}

static void do_rounds(const struct work *work, unsigned long number, unsigned long rounds) {
    for (unsigned long round = 0; round < rounds; round++) {
        do_round(work, number);
    }
}

static void *act(void *argument) {
    const struct member *member = argument;
    struct work *work = member->work;
    (void)pthread_barrier_wait(&work->barrier);
    do_rounds(work, member->number, work->warm_up);
    (void)pthread_barrier_wait(&work->barrier);
    if (member->number == 0) {
        mark(MARK_BEGIN);
    }
    (void)pthread_barrier_wait(&work->barrier);
    do_rounds(work, member->number, work->rounds);
    (void)pthread_barrier_wait(&work->barrier);
    if (member->number == 0) {
        mark(MARK_END);
    }
    return NULL;
}

static void run(struct work *work) {
    struct member *members = checked(calloc(work->threads, sizeof *members), program_name);
    pthread_t *threads = checked(calloc(work->threads, sizeof *threads), program_name);
    work->sides = checked(aligned_alloc(LINE, work->threads * sizeof *work->sides), program_name);
    if (pthread_barrier_init(&work->barrier, NULL, (unsigned)work->threads) != 0) {
        fail(program_name, "cannot make a barrier");
    }
    for (unsigned long i = 0; i < work->threads; i++) {
        size_t bytes = (work->blocks * sizeof(uint64_t *) + LINE - 1) / LINE * LINE;
        uint64_t **blocks = checked(aligned_alloc(LINE, bytes), program_name);
        work->sides[i] = (struct side){.blocks = blocks, .random = i};
        members[i] = (struct member){work, i};
    }
    for (unsigned long i = 1; i < work->threads; i++) {
        if (pthread_create(&threads[i], NULL, act, &members[i]) != 0) {
            fail(program_name, "cannot start a thread");
        }
    }
    (void)act(&members[0]);
    for (unsigned long i = 1; i < work->threads; i++) {
        (void)pthread_join(threads[i], NULL);
    }
}

int main(int argc, char **argv) {
    static const char *const choices[] = {"self", "next", "partner", NULL};
    struct work work = {.threads = 2, .least = 64, .most = 64, .blocks = 4096, .warm_up = 1, .rounds = 1};
    const struct option_spec options[] = {
        {"threads", "number of threads", OPTION_COUNT, &work.threads, 1, 2048, NULL},
        {"min", "minimum bytes in a block", OPTION_COUNT, &work.least, 8, 1UL << 30, NULL},
        {"max", "maximum bytes in a block", OPTION_COUNT, &work.most, 8, 1UL << 30, NULL},
        {"blocks", "blocks of a thread in a round", OPTION_COUNT, &work.blocks, 1, 10000000, NULL},
        {"warm-up", "rounds before those that count", OPTION_COUNT, &work.warm_up, 0, 1000000, NULL},
        {"rounds", "rounds that count", OPTION_COUNT, &work.rounds, 1, 1000000, NULL},
        {"freed-by", "who frees a block", OPTION_CHOICE, &work.freed_by, 0, 0, choices},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads allocate blocks, and free their own or those of another thread.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (work.least > work.most) {
        reject_arguments(program_name, "--min is more than --max");
    }
    if (work.freed_by == BY_PARTNER && work.threads % 2 != 0) {
        reject_arguments(program_name, "--freed-by partner needs an even number of threads");
    }
    double begin = now_seconds();
    run(&work);
    unsigned long allocating = work.freed_by == BY_PARTNER ? work.threads / 2 : work.threads;
    printf("{\"workload\": \"exchange\", \"threads\": %lu, \"min\": %lu, \"max\": %lu, \"blocks\": %lu, "
           "\"warm-up\": %lu, \"rounds\": %lu, \"freed-by\": \"%s\", \"pairs\": %lu, \"seconds\": %.6f}\n",
           work.threads, work.least, work.most, work.blocks, work.warm_up, work.rounds,
           choices[work.freed_by], allocating * work.blocks * work.rounds, now_seconds() - begin);
    return 0;
}
