#include "offload/contention.h"

#include "base/assert.h"
#include "base/size.h"
#include "os/clock.h"

#define CHECK_NS 8000000ULL
/* Others run on the server's CPU if the server runs for less than this share of
 * its time awake. */
#define MIN_SHARE 0.85
/* The process keeps all CPUs busy if it leaves less than this idle, and has
 * room for the server if more. */
#define MAX_BUSY_IDLE_CPUS 0.15
#define MIN_ROOM_CPUS      0.75
#define MIN_PAUSE_NS       50000000ULL
#define MAX_PAUSE_NS       3200000000ULL
/* If the server has served this many times as long as the last pause, the next
 * one is short. */
#define FORGET_TIMES 16
#define MIN_WAIT_NS  1000000ULL

static void sample(struct contention *contention, uint64_t now_ns) {
    calm_assert(now_ns >= contention->checked_ns, now_ns, contention->checked_ns);
    contention->checked_ns = now_ns;
    contention->ran_ns = clock_read_ns(CLOCK_THREAD_CPUTIME_ID);
    contention->used_ns = clock_read_ns(CLOCK_PROCESS_CPUTIME_ID);
    contention->slept_ns = 0;
}

bool contention_check(struct contention *contention, uint64_t now_ns) {
    struct contention before = *contention;
    if (before.checked_ns != 0 && now_ns - before.checked_ns < CHECK_NS) {
        return false;
    }
    sample(contention, now_ns);
    double passed = (double)(now_ns - before.checked_ns);
    double ran = (double)(contention->ran_ns - before.ran_ns);
    double used = (double)(contention->used_ns - before.used_ns);
    bool disturbed = ran < MIN_SHARE * (passed - (double)before.slept_ns);
    bool busy = used > (contention->cpus - MAX_BUSY_IDLE_CPUS) * passed && ran < MIN_SHARE * passed;
    bool contended = before.checked_ns != 0 && (disturbed || busy);
    contention->contended_checks = contended ? before.contended_checks + 1 : 0;
    return contention->contended_checks >= CONTENTION_CHECKS;
}

void contention_back_off(struct contention *contention, uint64_t now_ns) {
    if (contention->pause_ns != 0 &&
        now_ns - contention->served_since_ns > FORGET_TIMES * contention->pause_ns) {
        contention->pause_ns = 0;
    }
    contention->pause_ns = size_max(size_min(contention->pause_ns * 2, MAX_PAUSE_NS), MIN_PAUSE_NS);
    contention->pause_until_ns = now_ns + contention->pause_ns;
    sample(contention, now_ns);
    contention->contended_checks = 0;
}

uint64_t contention_wait_ns(const struct contention *contention, uint64_t now_ns, uint64_t max_ns) {
    return size_max(size_min(size_minus(contention->pause_until_ns, now_ns), max_ns), MIN_WAIT_NS);
}

bool contention_is_over(struct contention *contention, uint64_t now_ns) {
    if (now_ns < contention->pause_until_ns) {
        return false;
    }
    struct contention before = *contention;
    sample(contention, now_ns);
    contention->pause_until_ns = now_ns + contention->pause_ns;
    double passed = (double)(now_ns - before.checked_ns + 1);
    double used = (double)(contention->used_ns - before.used_ns) / passed;
    bool room = used < contention->cpus - MIN_ROOM_CPUS;
    contention->served_since_ns = room ? now_ns : contention->served_since_ns;
    return room;
}
