/*
 * Requests of another process: the protocol of one block, then the whole allocator by its calm_ names, asked
 * through /proc/self/mem as another process would, while threads allocate, a signal handler does, and the
 * process forks.
 */
#include "calmalloc.h"
#include "check.h"
#include "counter_reader.h"

#include "api/features.h"
#include "os/control.h"
#include "profile/samples.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define TAKERS  4
#define WORKERS 4

/* --- the protocol --- */

static struct control block = CONTROL_INITIAL;
static _Atomic(uint32_t) carried_out;
static _Atomic(bool) over;

static void ask_block(uint32_t number, uint32_t request, uint64_t argument) {
    atomic_store_explicit(&block.ticket, number, memory_order_relaxed);
    atomic_store_explicit(&block.request, request, memory_order_relaxed);
    atomic_store_explicit(&block.argument, argument, memory_order_relaxed);
    atomic_store_explicit(&block.pending, number, memory_order_release);
}

static void test_protocol(void) {
    struct control_claim claim;
    struct control_claim other;
    CHECK(!control_is_pending(&block) && !control_claim(&block, &claim));
    ask_block(7, CONTROL_TRIM, 100);
    CHECK(control_is_pending(&block) && control_claim(&block, &claim));
    CHECK_EQUAL(claim.number, 7);
    CHECK_EQUAL(claim.request, CONTROL_TRIM);
    CHECK_EQUAL(claim.argument, 100);
    CHECK(!control_claim(&block, &other)); /* by another thread, or by this one on its way */
    CHECK_EQUAL(atomic_load(&block.completed), 0);
    control_complete(&block, &claim, EPERM, 55);
    CHECK(!control_is_pending(&block));
    CHECK_EQUAL(atomic_load(&block.completed), 7);
    CHECK_EQUAL(atomic_load(&block.error), EPERM);
    CHECK_EQUAL(atomic_load(&block.result), 55);

    /* A number that was read half-written, or whose ticket another asker has replaced, is nobody's. */
    ask_block(0x1234, CONTROL_TRIM, 0);
    atomic_store(&block.pending, 0x34);
    CHECK(control_is_pending(&block) && !control_claim(&block, &claim));
    atomic_store(&block.pending, 0x1234);
    CHECK(control_claim(&block, &claim));
    /* One that is given up while it is carried out, and followed by the next. */
    ask_block(9, CONTROL_PROFILE, 1);
    control_complete(&block, &claim, 0, 1);
    CHECK(control_is_pending(&block) && control_claim(&block, &claim));
    CHECK_EQUAL(claim.number, 9);

    control_cancel(&block);
    CHECK(!control_is_pending(&block));
}

static void *take(void *unused) {
    struct control_claim claim;
    while (!atomic_load_explicit(&over, memory_order_relaxed)) {
        if (control_is_pending(&block) && control_claim(&block, &claim)) {
            atomic_fetch_add_explicit(&carried_out, 1, memory_order_relaxed);
            control_complete(&block, &claim, 0, claim.argument + claim.number);
        }
        sched_yield();
    }
    return unused;
}

/* Each is carried out once, by whichever thread. */
static void test_takers(void) {
    pthread_t threads[TAKERS];
    for (int i = 0; i < TAKERS; i++) {
        CHECK(pthread_create(&threads[i], NULL, take, NULL) == 0);
    }
    const uint32_t requests = 2000;
    for (uint32_t number = 100; number < 100 + requests; number++) {
        ask_block(number, CONTROL_TRIM, number * 3);
        while (atomic_load_explicit(&block.completed, memory_order_acquire) != number) {
            sched_yield();
        }
        CHECK_EQUAL(atomic_load_explicit(&block.result, memory_order_relaxed), number * 4);
        while (atomic_load_explicit(&block.pending, memory_order_acquire) != 0) {
            sched_yield();
        }
    }
    atomic_store(&over, true);
    for (int i = 0; i < TAKERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK_EQUAL(atomic_load(&carried_out), requests);
}

/* --- the whole allocator --- */

static int own_memory;
static uint64_t control_at;
static uint32_t last_number = 1000;

static void write_at(size_t offset, const void *bytes, size_t size) {
    CHECK_EQUAL(pwrite(own_memory, bytes, size, (off_t)(control_at + offset)), size);
}

static struct control read_control(void) {
    struct control now;
    CHECK_EQUAL(pread(own_memory, &now, sizeof now, (off_t)control_at), sizeof now);
    return now;
}

/* As another process does. */
static struct control ask(uint32_t request, uint64_t argument) {
    struct {
        uint32_t ticket, request;
        uint64_t argument;
    } wish = {++last_number, request, argument};
    _Static_assert(offsetof(struct control, argument) - offsetof(struct control, ticket) == 8, "one write");
    write_at(offsetof(struct control, ticket), &wish, sizeof wish);
    write_at(offsetof(struct control, pending), &last_number, sizeof last_number);
    struct control now = read_control();
    for (; now.completed != last_number; now = read_control()) {
        sched_yield();
    }
    CHECK(now.error == 0 || now.error == ENOSYS || now.error == EINVAL);
    return read_control();
}

static _Atomic(bool) stop;
static pthread_t workers[WORKERS];

static void allocate_some(unsigned step) {
    void *blocks[40];
    for (unsigned i = 0; i < 40; i++) {
        size_t size = i % 10 == 0 ? (size_t)(step % 7 + 1) << 16 : (size_t)(step * 37 + i * 101) % 3000;
        blocks[i] = calm_malloc(size);
        CHECK(blocks[i] != NULL);
        memset(blocks[i], 1, size < 64 ? size : 64);
    }
    for (unsigned i = 0; i < 40; i++) {
        calm_free(blocks[i]);
    }
}

static _Thread_local volatile sig_atomic_t is_allocating;

static void allocate_in_turn(unsigned step) {
    is_allocating = 1;
    allocate_some(step);
    is_allocating = 0;
}

static void *work(void *number) {
    for (unsigned step = (unsigned)(uintptr_t)number; !atomic_load_explicit(&stop, memory_order_relaxed);
         step++) {
        allocate_in_turn(step);
    }
    return NULL;
}

/* As with any malloc, a handler may not allocate where it interrupted the allocator; with this one it may
 * fork there, also while a request is carried out. */
static void handle(int signal) {
    (void)signal;
    int saved_errno = errno;
    if (!is_allocating) {
        allocate_some(3);
        errno = saved_errno;
        return;
    }
    pid_t child = fork();
    if (child == 0) {
        _Exit(atomic_load(&os_control.pending) == 0 ? 0 : 1);
    }
    int status = 0;
    CHECK(child < 0 || (waitpid(child, &status, 0) == child && status == 0));
    errno = saved_errno;
}

static void *interrupt(void *unused) {
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        pthread_kill(workers[0], SIGUSR1); /* one thread: two that fork so may wait for each other */
        usleep(20000);
    }
    return unused;
}

/* The child was asked for nothing, and answers for itself. */
static void test_fork(void) {
    uint32_t number = ++last_number;
    write_at(offsetof(struct control, pending), &number,
             sizeof number); /* without a ticket: it stays asked */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_EQUAL(atomic_load(&os_control.pending), 0);
        CHECK(calm_set("background", "off") == 0); /* ThreadSanitizer lets no thread start here */
        allocate_some(1);
        _Exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQUAL(status, 0);
    uint32_t none = 0;
    write_at(offsetof(struct control, pending), &none, sizeof none);
}

static uint64_t purges_request(void) {
    struct calm_stats stats;
    CHECK(calm_stats(&stats, sizeof stats) == 0);
    return stats.purges_request;
}

static void test_requests(bool interrupted, unsigned rounds) {
    atomic_store(&stop, false);
    for (int i = 0; i < WORKERS; i++) {
        CHECK(pthread_create(&workers[i], NULL, work, (void *)(uintptr_t)(i * 1000)) == 0);
    }
    pthread_t interrupter;
    CHECK(!interrupted || pthread_create(&interrupter, NULL, interrupt, NULL) == 0);
    uint64_t before = purges_request();
    for (unsigned round = 0; round < rounds; round++) {
        ask(CONTROL_TRIM, round % 2 == 0 ? 0 : 1 << 20);
        struct control on = ask(CONTROL_PROFILE, 16 << 10);
        CHECK_EQUAL(on.result, 16 << 10);
        CHECK_EQUAL(ask(CONTROL_PROFILE, (uint64_t)1 << 31).error, EINVAL);
        struct control off = ask(CONTROL_PROFILE, 0);
        CHECK_EQUAL(off.result, 0);
        CHECK_EQUAL(ask(77, 0).error, ENOSYS);
        if (!interrupted && round % 4 == 0) {
            test_fork();
        }
    }
    CHECK(purges_request() > before);
    atomic_store(&stop, true);
    if (interrupted) {
        CHECK(pthread_join(interrupter, NULL) == 0);
    }
    for (int i = 0; i < WORKERS; i++) {
        CHECK(pthread_join(workers[i], NULL) == 0);
    }
}

/* A trim gives back what is free, and a program's own profile goes before one that is asked for. */
static void test_results(void) {
    atomic_store(&stop, false);
    CHECK(pthread_create(&workers[0], NULL, work, NULL) == 0);
    CHECK(calm_set("test_policy", "paper") == 0 && calm_set("memory_per_cpu", "160") == 0);
    static void *blocks[256];
    for (int i = 0; i < 256; i++) {
        blocks[i] = calm_malloc(1 << 18);
        memset(blocks[i], 1, 1 << 18);
    }
    for (int i = 0; i < 256; i += 2) {
        calm_free(blocks[i]);
    }
    uint64_t given = ask(CONTROL_TRIM, 0).result;
    CHECK(given >= (size_t)128 << 16); /* the half, at least: some may be in use again, or gone back before */
    CHECK(calm_set("profile", "4096") == 0);
    CHECK_EQUAL(ask(CONTROL_PROFILE, 16 << 10).result, 4096);
    CHECK_EQUAL(ask(CONTROL_PROFILE, 0).result, 4096);
    CHECK(calm_set("profile", "0") == 0);
    CHECK_EQUAL(ask(CONTROL_PROFILE, 0).result, 0);
    for (int i = 1; i < 256; i += 2) {
        calm_free(blocks[i]);
    }
    atomic_store(&stop, true);
    CHECK(pthread_join(workers[0], NULL) == 0);
    CHECK(calm_set("test_policy", "adaptive") == 0 && calm_set("memory_per_cpu", "auto") == 0);
}

/* A profile ends by itself after the seconds that it was asked for; asked again, it goes on. */
static void test_lease(void) {
    atomic_store(&stop, false);
    CHECK(pthread_create(&workers[0], NULL, work, NULL) == 0);
    CHECK_EQUAL(ask(CONTROL_PROFILE, (uint64_t)1 << 32 | 4096).result, 4096);
    while (atomic_load(&heap_profile_mean) != 0) {
        usleep(1000);
    }
    CHECK_EQUAL(ask(CONTROL_PROFILE, (uint64_t)1 << 32 | 4096).result, 4096);
    CHECK_EQUAL(ask(CONTROL_PROFILE, 8192).result, 8192);
    struct timespec two_seconds = {.tv_sec = 2};
    CHECK(nanosleep(&two_seconds, NULL) == 0);
    CHECK_EQUAL(atomic_load(&heap_profile_mean), 8192);
    CHECK_EQUAL(ask(CONTROL_PROFILE, 0).result, 0);
    atomic_store(&stop, true);
    CHECK(pthread_join(workers[0], NULL) == 0);
}

/* Also where there is no room for the block of another sample, as long as the program frees nothing. */
static void test_lease_without_room(void) {
    static void *blocks[MAX_SAMPLE_BLOCKS];
    atomic_store(&stop, false);
    CHECK(pthread_create(&workers[0], NULL, work, NULL) == 0);
    CHECK_EQUAL(ask(CONTROL_PROFILE, (uint64_t)3 << 32 | 1).result, 1);
    atomic_store(&stop, true);
    CHECK(pthread_join(workers[0], NULL) == 0);
    for (size_t i = 0; i < MAX_SAMPLE_BLOCKS; i++) {
        blocks[i] = calm_malloc(64);
    }
    void *last = NULL;
    for (int i = 0; i < 20000 && atomic_load(&heap_profile_mean) != 0; i++) {
        void **next = calm_malloc(64);
        *next = last;
        last = next;
        usleep(1000);
    }
    CHECK_EQUAL(atomic_load(&heap_profile_mean), 0);
    while (last != NULL) {
        void *next = *(void **)last;
        calm_free(last);
        last = next;
    }
    for (size_t i = 0; i < MAX_SAMPLE_BLOCKS; i++) {
        calm_free(blocks[i]);
    }
}

/* After the library's own, which writes the profile that test_results has chosen. */
__attribute__((destructor(101))) static void remove_profile(void) {
    char name[64];
    snprintf(name, sizeof name, "calmalloc.%d.heap", (int)getpid());
    unlink(name);
}

int main(int count, char **arguments) {
    unsigned rounds = count > 1 ? (unsigned)atoi(arguments[1]) : 20;
    test_protocol();
    test_takers();
    calm_free(calm_malloc(1));
    const struct counter_table *table = counter_table_of("calmalloc");
    CHECK(table->control == &os_control);
    own_memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    CHECK(own_memory >= 0);
    control_at = (uintptr_t)table->control;
    struct control now = read_control();
    CHECK(memcmp(now.magic, "calmctrl", 8) == 0);
    CHECK_EQUAL(now.version, CONTROL_VERSION);
    CHECK_EQUAL(now.bytes, sizeof now);
    test_results();
    test_lease();
    test_lease_without_room();
    test_requests(false, rounds);
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    test_requests(true, rounds);
    return 0;
}
