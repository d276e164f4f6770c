#include "api/door.h"

#include "api/allocator.h"
#include "api/misuse.h"
#include "api/offloading.h"

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

struct taken door_take_blocks(uint32_t class, void **blocks, size_t count) {
    struct taken taken = {0, true};
    enum answer answer = ANSWER_DIRECT;
    if (is_offloaded()) {
        door_report_misuse();
        if (offloading_mode() == OFFLOADING_SYNC) {
            answer = client_take_sync(&calm_server, class, blocks);
            taken.count = answer == ANSWER_DONE && blocks[0] != NULL;
        } else {
            answer = client_take(&calm_server, cpu_cache_number(), class, blocks, count, &taken.count);
        }
    }
    if (answer == ANSWER_LOST) {
        return take_second(class, blocks);
    }
    if (answer == ANSWER_DIRECT) {
        taken.count = governor_take_blocks(&calm_governor, class, blocks, count);
    }
    return taken;
}

void door_put_blocks(uint32_t class, void *const *blocks, size_t count) {
    if (is_offloaded()) {
        door_report_misuse();
        if (is_second(blocks[0])) {
            governor_put_blocks(offloading_second(), class, blocks, count);
            return;
        }
        if (offloading_mode() == OFFLOADING_SYNC && count == 1 &&
            client_put_sync(&calm_server, class, blocks[0]) == ANSWER_DONE) {
            return;
        }
        if (client_is_served(&calm_server)) {
            client_put(&calm_server, cpu_cache_number(), class, blocks, count);
            return;
        }
    }
    governor_put_blocks(&calm_governor, class, blocks, count);
}

void *door_take_large(size_t pages, size_t align_pages, bool zeroed, bool *zero) {
    enum answer answer = ANSWER_DIRECT;
    struct governor *governor = &calm_governor;
    if (is_offloaded()) {
        door_report_misuse();
        void *block;
        answer = client_take_large(&calm_server, cpu_cache_number(), pages, align_pages,
                                   zeroed ? TAKE_ZEROED : 0, &block, zero);
        if (answer == ANSWER_DONE) {
            return block;
        }
        governor = answer == ANSWER_LOST ? offloading_second() : governor;
        if (governor == NULL) {
            return NULL;
        }
    }
    void *block = governor_take_large(governor, pages, align_pages, zero);
    if (block != NULL && zeroed && *zero) {
        governor_populate(governor, block, pages);
    }
    return block;
}

void door_put_large(void *block) {
    if (is_offloaded()) {
        door_report_misuse();
        if (is_second(block)) {
            governor_put_large(offloading_second(), block);
            return;
        }
        if (client_is_served(&calm_server)) {
            const struct span *span = heap_large_span(&calm_governor.heap, block);
            size_t bytes = span == NULL ? 0 : (size_t)span->pages << calm_governor.heap.space.page_shift;
            client_put_large(&calm_server, cpu_cache_number(), block, bytes);
            return;
        }
    }
    governor_put_large(&calm_governor, block);
}

struct resize {
    struct governor *governor;
    void *block;
    size_t pages;
    void *resized;
};

static void resize(void *subject) {
    struct resize *this = subject;
    struct span *span = heap_large_span(&this->governor->heap, this->block);
    this->resized = span == NULL ? NULL : governor_resize_large(this->governor, span, this->pages);
}

void *door_resize_large(void *block, size_t pages) {
    struct resize this = {is_second(block) ? offloading_second() : &calm_governor, block, pages, NULL};
    enum answer answer = ANSWER_DIRECT;
    if (is_offloaded() && this.governor == &calm_governor) {
        answer = client_run(&calm_server, cpu_cache_number(), CALL_SHORT, resize, &this);
    }
    if (answer == ANSWER_DIRECT) {
        resize(&this);
    }
    return this.resized;
}

struct trim {
    size_t keep_bytes;
    size_t given;
};

static void trim_by_server(void *subject) {
    struct trim *this = subject;
    server_serve(&calm_server);
    this->given = governor_trim(&calm_governor, this->keep_bytes);
}

size_t door_trim(size_t keep_bytes) {
    size_t given = 0;
    struct trim this = {keep_bytes, 0};
    enum answer answer = ANSWER_DIRECT;
    if (is_offloaded()) {
        struct governor *second = offloading_second_if_made();
        given = second == NULL ? 0 : governor_trim(second, keep_bytes);
        answer = client_run(&calm_server, cpu_cache_number(), CALL_LONG, trim_by_server, &this);
        door_report_misuse();
    }
    if (answer == ANSWER_DIRECT) {
        this.given = governor_trim(&calm_governor, keep_bytes);
    }
    return given + this.given;
}

static void refresh(void *subject) {
    governor_refresh(subject);
}

void door_refresh(void) {
    if (!is_offloaded() ||
        client_run(&calm_server, cpu_cache_number(), CALL_LONG, refresh, &calm_governor) == ANSWER_DIRECT) {
        governor_refresh(&calm_governor);
    }
}

struct look {
    void (*look)(void *subject);
    void *subject;
};

static void look_by_server(void *subject) {
    const struct look *this = subject;
    server_serve(&calm_server);
    this->look(this->subject);
}

void door_look(void (*look)(void *subject), void *subject) {
    struct look this = {look, subject};
    /* Not in the middle of a purge, when more is free than may be. Of a server that does not answer the
     * figures are read past it, as they happen to be. */
    if (!is_offloaded() ||
        client_run(&calm_server, cpu_cache_number(), CALL_LONG, look_by_server, &this) != ANSWER_DONE) {
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
    if (client_run(&calm_server, cpu_cache_number(), CALL_SHORT, collect, &this) == ANSWER_DIRECT) {
        collect(&this);
    }
    for (size_t i = 0; i < this.count; i++) {
        misuse_report(this.notes[i].kind, this.notes[i].pointer);
    }
}
