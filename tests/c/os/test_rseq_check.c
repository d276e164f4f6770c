/* A kernel that does not restart sequences is found out, and one that does is not accused. */
#include "os/rseq_check.h"

#include "os/thread.h"

#include "check.h"

static enum { STARTS, REFUSED, NEVER_COMES } thread_mode;

bool __real_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes);
bool __wrap_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes);

bool __wrap_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes) {
    return thread_mode == STARTS ? __real_thread_start(thread, body, argument, stack_bytes)
                                 : thread_mode == NEVER_COMES;
}

static void test_releases(void) {
    CHECK(rseq_is_suspect("4.4.0", 0));
    CHECK(rseq_is_suspect("4.4.0", 32));
    CHECK(rseq_is_suspect("5.9.16-generic", 0));
    CHECK(rseq_is_suspect("6.3", 0));
    CHECK(rseq_is_suspect("7.0.0", 0));
    CHECK(rseq_is_suspect("", 0));
    CHECK(!rseq_is_suspect("5.10.0-21-amd64", 0));
    CHECK(!rseq_is_suspect("6.2.16", 0));
    CHECK(!rseq_is_suspect("6.3.0", 28));
    CHECK(!rseq_is_suspect("10.1", 32));
}

/* The kernel restarts by the area that is registered, and finds no sequence in another one. */
static void test_restarts(void) {
    static _Thread_local char elsewhere[32] __attribute__((aligned(32)));
    struct rseq_offsets offsets = rseq_find();
    if (!offsets.usable || !rseq_can_restart()) {
        printf("no restartable sequences here\n");
        return;
    }
    struct rseq_offsets others = offsets;
    others.sequence = elsewhere - (char *)thread_pointer() + RSEQ_CS;
    for (unsigned i = 0; i < check_rounds(100); i++) {
        WAIT_UNTIL(rseq_is_restarted(&offsets)); /* on a busy machine the other thread may come too late */
        CHECK(!rseq_is_restarted(&others));
    }
    CHECK(!rseq_is_broken(&offsets));
    /* Without the other thread nothing is known, and the test ends all the same. */
    thread_mode = REFUSED;
    CHECK(!rseq_is_restarted(&offsets));
    thread_mode = NEVER_COMES;
    CHECK(!rseq_is_restarted(&others));
    thread_mode = STARTS;
}

int main(void) {
    test_releases();
    test_restarts();
    return 0;
}
