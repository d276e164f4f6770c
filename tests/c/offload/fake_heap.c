#include "fake_heap.h"

#include "arena/blocks.h"
#include "arena/large.h"
#include "os/futex.h"
#include "os/syscall.h"
#include "os/text.h"

#include <string.h>

#define MAGAZINES 400
#define LARGE     64

struct server server;
struct size_classes classes;
struct fake_heap heap;
_Atomic(bool) is_contended;
_Atomic(bool) has_room = true;
_Atomic(bool) refuses_threads;

static struct arenas fake_governor;
static struct cpu_caches fake_caches;

/* Also on the server, whose thread the C library does not know. */
#define FAKE_CHECK(condition) ((condition) ? (void)0 : fail(#condition, __LINE__))

static void fail(const char *condition, unsigned line) {
    text_write_line(2, __FILE__ ":%u: %s", line, condition);
    os_syscall(SYS_exit_group, 1);
}

/* ---- what is replaced ---- */

bool __real_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes);
bool __wrap_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes);
bool __wrap_contention_check(struct contention *contention, uint64_t now_ns);
bool __wrap_contention_is_over(struct contention *contention, uint64_t now_ns);
void __wrap_affinity_update(struct affinity_survey *survey, const char *root, int server_thread);
struct affinity_choice __wrap_affinity_choose(const struct affinity_view *view,
                                              struct affinity_request request, uint64_t seed);

bool __wrap_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes) {
    return !atomic_load(&refuses_threads) && __real_thread_start(thread, body, argument, stack_bytes);
}

bool __wrap_contention_check(struct contention *contention, uint64_t now_ns) {
    (void)contention, (void)now_ns;
    return atomic_load(&is_contended);
}

bool __wrap_contention_is_over(struct contention *contention, uint64_t now_ns) {
    (void)contention, (void)now_ns;
    return atomic_load(&has_room);
}

void __wrap_affinity_update(struct affinity_survey *survey, const char *root, int server_thread) {
    (void)survey, (void)root, (void)server_thread;
}

struct affinity_choice __wrap_affinity_choose(const struct affinity_view *view,
                                              struct affinity_request request, uint64_t seed) {
    (void)view, (void)request, (void)seed;
    return (struct affinity_choice){-1, true};
}

/* ---- the heap ---- */

struct block {
    uint32_t size_class;
    bool out;
    struct block *next; /* free */
    uint64_t mark;      /* the holder's, plain */
};

static struct block *free_blocks[SIZE_CLASSES];
static struct lock heap_only = LOCK_OF(LOCK_HEAP);
static _Atomic(uint32_t) gate_closed;
static _Atomic(bool) gate_waiting;

void gate_close(void) {
    atomic_store(&gate_closed, 1);
}

void gate_open(void) {
    atomic_store(&gate_closed, 0);
    futex_wake_all(&gate_closed);
}

bool gate_has_waiter(void) {
    return atomic_load(&gate_waiting);
}

static void pass_gate(void) {
    while (atomic_load(&gate_closed) != 0) {
        atomic_store(&gate_waiting, true);
        futex_wait(&gate_closed, 1, 0);
    }
    atomic_store(&gate_waiting, false);
}

static size_t take(uint32_t size_class, void **blocks, size_t count) {
    size_t taken = 0;
    lock_acquire(&heap_only);
    while (taken < count && free_blocks[size_class] != NULL && !atomic_load(&heap.is_short)) {
        struct block *block = free_blocks[size_class];
        FAKE_CHECK(!block->out && block->size_class == size_class);
        free_blocks[size_class] = block->next;
        block->out = true;
        blocks[taken++] = block;
    }
    atomic_fetch_add(&heap.out, taken);
    atomic_fetch_add(&heap.takes, 1);
    lock_release(&heap_only);
    pass_gate();
    return taken;
}

static void put(uint32_t size_class, void *const *blocks, size_t count) {
    lock_acquire(&heap_only);
    for (size_t i = 0; i < count; i++) {
        struct block *block = blocks[i];
        FAKE_CHECK(block->out && block->size_class == size_class);
        block->mark = 0;
        block->out = false;
        block->next = free_blocks[size_class];
        free_blocks[size_class] = block;
    }
    atomic_fetch_sub(&heap.out, count);
    atomic_fetch_add(&heap.puts, 1);
    lock_release(&heap_only);
}

size_t arena_take_blocks(struct arenas *arenas, uint32_t size_class, void **blocks, size_t count) {
    FAKE_CHECK(arenas == &fake_governor && size_class > 0 && size_class < classes.count);
    return take(size_class, blocks, count);
}

void arena_put_blocks(struct arenas *arenas, uint32_t size_class, void *const *blocks, size_t count) {
    FAKE_CHECK(arenas == &fake_governor && size_class > 0 && count > 0 && count <= MAX_MAGAZINE_BLOCKS);
    put(size_class, blocks, count);
}

void *arena_take_large(struct arenas *arenas, size_t pages, size_t align_pages, bool zeroed, bool *zero) {
    FAKE_CHECK(arenas == &fake_governor && pages > 0 && align_pages > 0);
    void *block = NULL;
    *zero = zeroed;
    take(0, &block, 1);
    return block;
}

void arena_put_large(struct arenas *arenas, void *block) {
    FAKE_CHECK(arenas == &fake_governor);
    put(0, &block, 1);
}

void heap_before_fork(void) {
    lock_acquire_for_fork(&heap_only, true);
}

void heap_after_fork(void) {
    lock_release_after_fork(&heap_only);
}

/* ---- the server ---- */

void set_up(unsigned endpoints, size_t cache_bytes, uint64_t timeout_ns) {
    size_classes_fill(&classes, 4096);
    for (uint32_t size_class = 0; size_class < classes.count; ++size_class) {
        size_t count = size_class == 0 ? LARGE : (size_t)MAGAZINES * classes.of[size_class].batch;
        struct block *blocks = calloc(count, sizeof *blocks);
        CHECK(blocks != NULL);
        for (size_t i = 0; i < count; i++) {
            blocks[i] = (struct block){.size_class = size_class, .next = free_blocks[size_class]};
            free_blocks[size_class] = &blocks[i];
        }
    }
    fake_caches.count = endpoints;
    fake_governor.caches = &fake_caches;
    static struct arena arena;
    arena.heap.classes = &classes;
    fake_governor.of = &arena;
    server.setup = (struct server_setup){.arenas = &fake_governor, .timeout_ns = timeout_ns};
    CHECK(server_init(&server, cache_bytes));
}

void launch(void) {
    while (atomic_load(&server.words.thread) == THREAD_NONE) {
        server_note_operation(&server);
    }
    WAIT_UNTIL(server_serves(&server));
}

void stop_server(void) {
    atomic_fetch_add(&thread_start_holds, 1);
    /* By the test's own clock, since the server's may stand still. */
    WAIT_UNTIL(server_stop(&server, 1));
    atomic_fetch_sub(&thread_start_holds, 1);
}

void finish(void) {
    stop_server();
    server_flush(&server, LONG_TIMEOUT_NS);
    CHECK_EQUAL(prepared_blocks(), 0);
    CHECK_EQUAL(atomic_load(&heap.out), 0);
}

/* ---- a client ---- */

static struct request request_of_held(struct held *held) {
    return (struct request){.size_class = held->size_class,
                            .blocks = held->blocks,
                            .count = held->count,
                            .pages = held->pages,
                            .align_pages = 1,
                            .bytes = held->pages * 4096};
}

static void mark(struct held *held) {
    for (size_t i = 0; i < held->count; i++) {
        struct block *block = held->blocks[i];
        CHECK(block->out);
        CHECK_EQUAL(block->size_class, held->size_class);
        CHECK_EQUAL(block->mark, 0);
        block->mark = (uintptr_t)held;
    }
}

bool ask(unsigned number, struct held *held, uint32_t size_class, size_t pages) {
    *held = (struct held){.size_class = size_class, .pages = pages};
    held->count = size_class == 0 ? 1 : classes.of[size_class].batch;
    struct request request = request_of_held(held);
    held->count = client_take(&server, number, &request);
    mark(held);
    return held->count > 0;
}

void obtain(unsigned number, struct held *held, uint32_t size_class, size_t pages) {
    if (ask(number, held, size_class, pages)) {
        return;
    }
    bool zero;
    if (size_class != 0) {
        held->count =
            arena_take_blocks(&fake_governor, size_class, held->blocks, classes.of[size_class].batch);
    } else {
        held->blocks[0] = arena_take_large(&fake_governor, pages, 1, false, &zero);
        held->count = held->blocks[0] != NULL;
    }
    mark(held);
}

bool give_up(unsigned number, struct held *held) {
    if (held->count == 0) {
        return false;
    }
    for (size_t i = 0; i < held->count; i++) {
        struct block *block = held->blocks[i];
        CHECK_EQUAL(block->mark, (uintptr_t)held);
        block->mark = 0;
    }
    struct request request = request_of_held(held);
    bool sent = client_put(&server, number, &request);
    if (!sent) {
        server_put(&server, held->size_class, held->blocks, held->count);
    }
    held->count = 0;
    return sent;
}

size_t prepared_blocks(void) {
    size_t bytes;
    return prefill_blocks(&server, &bytes);
}
