#include "api/door.h"

#include "api/allocator.h"
#include "api/misuse.h"
#include "api/offloading.h"
#include "api/requests.h"

static bool is_offloaded(void) {
    return __builtin_expect(offloading_mode() != OFFLOADING_NONE, 0);
}

/* One block of the second heap. */
static struct taken take_second(uint32_t class, void **block) {
    struct governor *second = offloading_second();
    return (struct taken){second == NULL ? 0 : governor_take_blocks(second, class, block, 1), false};
}

static bool is_second(const void *block) {
    struct governor *second = offloading_second_if_made();
    return second != NULL && space_page(&second->heap.space, block) != 0;
}

/* Runs work(subject) at the heap when the server has lent it. False if it has it back: ask it again. */
static bool at_lent_heap(void (*work)(void *subject), void *subject) {
    struct endpoint *borrowed = client_borrow(&calm_server, cpu_cache_number());
    if (borrowed != NULL) {
        work(subject);
        client_return(borrowed);
    }
    return borrowed != NULL;
}

struct blocks {
    uint32_t class;
    void **blocks;
    size_t count;
};

static void take(void *subject) {
    struct blocks *this = subject;
    this->count = governor_take_blocks(&calm_governor, this->class, this->blocks, this->count);
}

static void put(void *subject) {
    const struct blocks *this = subject;
    governor_put_blocks(&calm_governor, this->class, this->blocks, this->count);
}

static enum answer ask_for_blocks(uint32_t class, void **blocks, size_t count, size_t *got) {
    if (offloading_mode() == OFFLOADING_SYNC) {
        enum answer answer = client_take_sync(&calm_server, class, blocks);
        *got = answer == ANSWER_DONE && blocks[0] != NULL;
        return answer;
    }
    return client_take(&calm_server, cpu_cache_number(), class, blocks, count, got);
}

static bool run_at_heap(enum call_kind kind, void (*work)(void *subject), void *subject);

/* Of the first heap. False if the server is not to be had: then there are none. */
static bool take_served(struct blocks *this) {
    for (;;) {
        size_t wanted = this->count;
        enum answer answer = ask_for_blocks(this->class, this->blocks, wanted, &this->count);
        if (answer == ANSWER_LOST) {
            this->count = wanted;
            return false;
        }
        if (answer == ANSWER_DONE) {
            return true;
        }
        this->count = wanted;
        if (at_lent_heap(take, this)) {
            door_report_misuse();
            return true;
        }
    }
}

/* As take_large_offloaded. */
struct taken door_take_blocks(uint32_t class, void **blocks, size_t count) {
    requests_notice(door_trim);
    if (!is_offloaded()) {
        return (struct taken){governor_take_blocks(&calm_governor, class, blocks, count), true};
    }
    door_report_misuse();
    struct blocks this = {class, blocks, count};
    bool served = take_served(&this);
    if (served && (this.count > 0 || offloading_second_if_made() == NULL)) {
        return (struct taken){this.count, true};
    }
    struct taken second = take_second(class, blocks);
    if (second.count > 0 || served || !run_at_heap(CALL_LONG, take, &this)) {
        return second;
    }
    return (struct taken){this.count, true};
}

static bool send_blocks(uint32_t class, void *const *blocks, size_t count) {
    if (offloading_mode() == OFFLOADING_SYNC && count == 1) {
        enum answer answer = client_put_sync(&calm_server, class, blocks[0]);
        if (answer != ANSWER_LOST) {
            return answer == ANSWER_DONE;
        }
    }
    return client_put(&calm_server, cpu_cache_number(), class, blocks, count);
}

void door_put_blocks(uint32_t class, void *const *blocks, size_t count) {
    requests_notice(door_trim);
    if (!is_offloaded()) {
        governor_put_blocks(&calm_governor, class, blocks, count);
        return;
    }
    door_report_misuse();
    if (is_second(blocks[0])) {
        governor_put_blocks(offloading_second(), class, blocks, count);
        server_wake(&calm_server); /* to tidy */
        return;
    }
    struct blocks lent = {class, (void **)(uintptr_t)blocks, count};
    while (!send_blocks(class, blocks, count)) {
        if (at_lent_heap(put, &lent)) {
            door_report_misuse();
            return;
        }
    }
}

struct large {
    struct governor *governor;
    void *block;
    size_t pages;
    size_t align_pages;
    bool zeroed;
    bool zero;
    bool populates; /* the caller, once it has left the heap */
};

static void plan(void *subject) {
    struct large *this = subject;
    this->populates = governor_may_populate(this->governor, this->block, this->pages);
}

static void take_large(void *subject) {
    struct large *this = subject;
    this->block = governor_take_large(this->governor, this->pages, this->align_pages, &this->zero);
    if (this->block != NULL && this->zeroed && this->zero) {
        plan(this);
    }
}

static void put_large(void *subject) {
    const struct large *this = subject;
    governor_put_large(this->governor, this->block);
}

/* Has the server do it; or does it at a lent heap. False if the server does not answer. */
static bool run_at_heap(enum call_kind kind, void (*work)(void *subject), void *subject) {
    for (;;) {
        enum answer answer = client_run(&calm_server, cpu_cache_number(), kind, work, subject);
        if (answer != ANSWER_LENT) {
            return answer == ANSWER_DONE;
        }
        if (at_lent_heap(work, subject)) {
            return true;
        }
    }
}

/* Of the first heap. False if the server is not to be had: then there is none. */
static bool take_large_served(struct large *this) {
    for (;;) {
        enum answer answer =
            client_take_large(&calm_server, cpu_cache_number(), this->pages, this->align_pages,
                              this->zeroed ? TAKE_ZEROED : 0, &this->block, &this->zero);
        if (answer == ANSWER_LOST) {
            return false;
        }
        if (answer == ANSWER_DONE) {
            if (this->block != NULL && this->zeroed && this->zero && !offloading_populates(this->pages)) {
                run_at_heap(CALL_SHORT, plan, this);
            }
            return true;
        }
        if (at_lent_heap(take_large, this)) {
            return true;
        }
    }
}

/* Each heap may have room where the other has none: the second one's is asked for first while the server is
 * not to be had, and then it is worth a longer wait. */
static void take_large_offloaded(struct large *this) {
    door_report_misuse();
    bool served = take_large_served(this);
    struct governor *second = served ? offloading_second_if_made() : offloading_second();
    if (this->block == NULL && second != NULL) {
        this->governor = second;
        take_large(this);
    }
    if (this->block == NULL && !served) {
        this->governor = &calm_governor;
        run_at_heap(CALL_LONG, take_large, this);
    }
}

void *door_take_large(size_t pages, size_t align_pages, bool zeroed, bool *zero) {
    requests_notice(door_trim);
    struct large this = {&calm_governor, NULL, pages, align_pages, zeroed, false, false};
    if (is_offloaded()) {
        take_large_offloaded(&this);
    } else {
        take_large(&this);
    }
    if (this.populates) {
        governor_populate(this.governor, this.block, pages);
    }
    *zero = this.zero;
    return this.block;
}

void door_put_large(void *block) {
    requests_notice(door_trim);
    struct large this = {&calm_governor, block, 0, 0, false, false, false};
    if (!is_offloaded()) {
        put_large(&this);
        return;
    }
    door_report_misuse();
    if (is_second(block)) {
        this.governor = offloading_second();
        put_large(&this);
        server_wake(&calm_server); /* to tidy */
        return;
    }
    const struct span *span = heap_large_span(&calm_governor.heap, block);
    if (span == NULL) {
        /* None that is in use: for the heap's owner to say what it is. */
        run_at_heap(CALL_SHORT, put_large, &this);
        door_report_misuse();
        return;
    }
    size_t bytes = (size_t)span->pages << calm_governor.heap.space.page_shift;
    while (!client_put_large(&calm_server, cpu_cache_number(), block, bytes)) {
        if (at_lent_heap(put_large, &this)) {
            door_report_misuse();
            return;
        }
    }
}

static void resize(void *subject) {
    struct large *this = subject;
    struct span *span = heap_large_span(&this->governor->heap, this->block);
    this->block = span == NULL ? NULL : governor_resize_large(this->governor, span, this->pages);
}

void *door_resize_large(void *block, size_t pages) {
    struct large this = {
        is_second(block) ? offloading_second() : &calm_governor, block, pages, 1, false, false, false};
    if (!is_offloaded() || this.governor != &calm_governor) {
        resize(&this);
        return this.block;
    }
    return run_at_heap(CALL_SHORT, resize, &this) ? this.block : NULL;
}

/* All that was sent to the server is served; nothing is there to serve while the heap is lent. */
static void serve_all(void) {
    if (calm_governor.owner != NULL) {
        server_serve(&calm_server);
    }
}

static void trim(void *subject) {
    size_t *bytes = subject;
    serve_all();
    *bytes = governor_trim(&calm_governor, *bytes);
}

size_t door_trim(size_t keep_bytes) {
    if (!is_offloaded()) {
        return governor_trim(&calm_governor, keep_bytes);
    }
    struct governor *second = offloading_second_if_made();
    /* Of the two together no more than that stays. */
    size_t given = second == NULL ? 0 : governor_trim(second, 0);
    size_t bytes = keep_bytes;
    given += run_at_heap(CALL_LONG, trim, &bytes) ? bytes : 0;
    door_report_misuse();
    return given;
}

static void refresh(void *subject) {
    governor_refresh(subject);
}

void door_refresh(void) {
    if (!is_offloaded()) {
        governor_refresh(&calm_governor);
    } else {
        run_at_heap(CALL_LONG, refresh, &calm_governor);
    }
}

static void limit_space(void *subject) {
    governor_limit_space(&calm_governor, *(const size_t *)subject);
}

void door_limit_space(size_t bytes) {
    struct governor *second = offloading_second_if_made();
    if (second != NULL) {
        governor_limit_space(second, bytes);
    }
    if (!is_offloaded()) {
        limit_space(&bytes);
    } else {
        run_at_heap(CALL_LONG, limit_space, &bytes);
    }
}

struct look {
    void (*look)(void *subject);
    void *subject;
};

static void look_closely(void *subject) {
    const struct look *this = subject;
    serve_all();
    this->look(this->subject);
}

void door_look(void (*look)(void *subject), void *subject) {
    struct look this = {look, subject};
    /* Not in the middle of a purge, when more is free than may be. Of a server that does not answer the
     * figures are read past it, as they happen to be. */
    if (!is_offloaded() || !run_at_heap(CALL_LONG, look_closely, &this)) {
        look(subject);
    }
}

struct heap *door_heap_of(const void *block) {
    if (space_page(&calm_governor.heap.space, block) != 0) {
        return &calm_governor.heap;
    }
    return is_second(block) ? &offloading_second_if_made()->heap : NULL;
}

struct misuses {
    size_t count;
    struct misuse_note notes[MISUSE_NOTES];
};

static void collect(void *subject) {
    struct misuses *this = subject;
    atomic_store_explicit(&calm_governor.misuse_waits, false, memory_order_relaxed);
    this->count = governor_take_misuse(&calm_governor, this->notes);
}

void door_report_misuse(void) {
    if (__builtin_expect(!atomic_load_explicit(&calm_governor.misuse_waits, memory_order_relaxed), 1)) {
        return;
    }
    struct misuses this = {0};
    run_at_heap(CALL_SHORT, collect, &this);
    for (size_t i = 0; i < this.count; i++) {
        misuse_report(this.notes[i].kind, this.notes[i].pointer);
    }
}
