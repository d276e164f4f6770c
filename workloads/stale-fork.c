/* Copy on write across fork, for stale-reads: a child lives on while its parent changes what both share, and
 * then changes it itself. Neither may see the other one's writes. */
#define _GNU_SOURCE
#include "stale-steps.h"
#include "support.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum phase { PHASE_BEGIN, PHASE_SEEN, PHASE_CHANGED, PHASE_WRITTEN };

static void nap(void) {
    sleep_seconds(5e-5);
}

static void await_phase(struct family *family, enum phase phase) {
    double deadline = now_seconds() + 0.05;
    while (atomic_load(&family->phase) < phase && now_seconds() < deadline) {
        nap();
    }
}

static _Noreturn void child_found(struct changer *child, const char *what, const char *at,
                                  uint64_t expected) {
    struct finding *finding = &child->family->finding;
    *finding = (struct finding){.operation = OP_FORK,
                                .what = what,
                                .slot = child->slot,
                                .page = (unsigned long)(at - child->slot->homes[0]) / child->test->page,
                                .at = at,
                                .there = true,
                                .found = load_at(at)};
    expect_number(finding, expected);
    _exit(1);
}

/* Of pages that are few enough to be remembered: all words that anybody writes. */
static unsigned long child_words(const struct changer *child) {
    unsigned long pages = child->slot->now[0].pages;
    pages = pages < FLUSHED_PAGES ? pages : FLUSHED_PAGES;
    return pages * (child->test->words + MOST_READERS);
}

static char *child_word(const struct changer *child, unsigned long number) {
    const struct test *test = child->test;
    unsigned long word = number % (test->words + MOST_READERS);
    size_t offset = word < test->words ? stamp_offset(test, word) : mark_offset(test, word - test->words);
    return page_at(child, 0, number / (test->words + MOST_READERS)) + offset;
}

static void child_remembers(struct changer *child) {
    const struct test *test = child->test;
    for (unsigned long i = 0; i < child_words(child); i++) {
        const char *at = child_word(child, i);
        unsigned long word = i % (test->words + MOST_READERS);
        unsigned long page = i / (test->words + MOST_READERS);
        child->records[i] = load_at(at);
        if (word < test->words) {
            const struct view *view = &child->slot->now[0];
            uint64_t expected = stamp_of(child->slot->number, page, word, view->generation);
            if (child->records[i] != expected) {
                child_found(child, "child does not have what there was when it was forked", at, expected);
            }
        }
    }
}

static _Noreturn void live(struct changer *child) {
    struct family *family = child->family;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    child_remembers(child);
    atomic_store(&family->phase, PHASE_SEEN);
    await_phase(family, PHASE_CHANGED);
    for (unsigned long i = 0; i < child_words(child); i++) {
        const char *at = child_word(child, i);
        if (load_at(at) != child->records[i]) {
            child_found(child, "child sees what its parent wrote", at, child->records[i]);
        }
    }
    unsigned owner = MOST_SLOTS + MOST_CHANGERS + (unsigned)child->number;
    for (unsigned long page = 0; page < child->slot->now[0].pages; page++) {
        put_stamps(child, page_at(child, 0, page), owner, page, 0);
    }
    atomic_store(&family->phase, PHASE_WRITTEN);
    nap();
    for (unsigned long page = 0; page < child->slot->now[0].pages; page++) {
        const char *at = page_at(child, 0, page) + stamp_offset(child->test, 0);
        if (load_at(at) != stamp_of(owner, page, 0, 0)) {
            child_found(child, "child does not see what it wrote", at, stamp_of(owner, page, 0, 0));
        }
    }
    _exit(0);
}

static void reap(struct changer *changer, pid_t child) {
    int status = 0;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) {
            refused("waitpid");
        }
    }
    if (changer->family->finding.what != NULL) {
        report(changer->test, &changer->family->finding);
    }
    if (status != 0) {
        char line[64];
        (void)snprintf(line, sizeof line, "fork: a child ended with status %#x", (unsigned)status);
        fail(program_name, line);
    }
}

unsigned long change_fork(struct changer *changer) {
    struct family *family = changer->family;
    have_stamped(changer);
    *family = (struct family){.phase = PHASE_BEGIN};
    pid_t child = fork();
    if (child < 0) {
        refused("fork");
    }
    if (child == 0) {
        live(changer);
    }
    if (chance(changer, 4)) {
        await_phase(family, PHASE_SEEN);
    } else if (!chance(changer, 3)) {
        /* To fork flushes TLBs: what is copied now shall be in them. */
        look_again(changer);
    }
    stamp_anew(changer);
    atomic_store(&family->phase, PHASE_CHANGED);
    await_phase(family, PHASE_WRITTEN);
    look_again(changer);
    reap(changer, child);
    check_marks(changer, 0);
    stamp_anew(changer);
    return changer->slot->now[0].pages;
}
