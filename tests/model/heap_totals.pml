/*
 * The totals of several heaps, and the limit on free pages. Each heap counts its pages in use and its free resident
 * pages under its lock. It reports them to the totals of all heaps when one of them has changed by more than a batch
 * since its last report. The limit follows from the pages in use. The check allows for what the reports may lack.
 *
 *   thread, under a heap's lock                       holder of the purger's lock
 *     used and free change                              purge to the limit:
 *     one changed by more than `batch` since the last     report of all heaps, each under its lock
 *       report, or there was none?                          max_batch = batch
 *         total_used += change; total_free += change      is over? for each heap: lock; take its free pages; report;
 *         is over? after unlock: lock the purger;           unlock; and again from the start
 *           purge to the limit                          change of the batch, as the limit changes:
 *                                                         batch = another; max_batch = max(max_batch, batch)
 *   is over:                                              purge to the limit, if the batch has become larger
 *     total_free > limit(total_used)
 *                    - 2 * max_batch * heaps
 *
 * A total differs from the true sum by at most max_batch for each heap, and by the changes of threads that have not
 * decided yet whether to report: one change for each heap at most. max_batch is the largest batch since all heaps
 * reported. The limit falls by at most one page for each page in use. So one error is that of the free pages, and the
 * other one that of the limit. At rest, when no thread is in the allocator, free pages do not exceed the limit.
 *
 * A check follows each change of what it depends on: a report, a larger batch, one heap more. Otherwise each heap may
 * gain another batch of free pages without a check. Only a holder of the purger's lock changes the batch. Otherwise
 * max_batch may fall, at the end of the report of all heaps, below a batch that became larger meanwhile.
 *
 * Memory: sequentially consistent; the additions and the loads of the check are seq_cst. If they were not, the load of
 * one total might come before the addition to the other (LIMIT_READ_EARLY). The same happens if a thread compares the
 * values that its two additions return. On x86 an atomic addition is a fence.
 *
 * Abstracted: two heaps, which stand for some of many (the batch of a single heap is 0); the second one may start with
 * its first change; the limit is the number of pages in use and a constant, at least as high as the allowance; the
 * batch changes at will; a purge keeps nothing, and is not refused. Its system call is left out, since pages leave the
 * count of free pages when a purge takes them.
 *
 * @claim bounded safety: at rest, free pages do not exceed the limit; the totals are as exact as stated above, and
 *   never negative; a report of all heaps makes them exact
 * @mutation ADD_BY_STORE bounded assertion: a total is loaded and stored, instead of an atomic addition
 * @mutation REPORTED_AFTER_UNLOCK bounded assertion: a change is reported after the release of the heap's lock
 * @mutation REPORT_FORGOTTEN bounded assertion: a heap does not note what it has reported
 * @mutation ONLY_FREE bounded assertion: a heap reports only if its free pages have changed by more than a batch
 * @mutation START_UNREPORTED bounded assertion: a heap that has not reported yet reports like any other
 * @mutation COUNTED_ELSEWHERE bounded assertion: freed pages are counted at a heap other than their own
 * @mutation CHECK_EARLY bounded assertion: a thread loads the totals before it adds to them
 * @mutation LIMIT_READ_EARLY bounded assertion: it loads one total before it adds to the other
 * @mutation ALLOWANCE_ONE bounded assertion: the check allows for the error of one total
 * @mutation ALLOWANCE_NOW bounded assertion: it allows for the present batch, even if an earlier one was larger
 * @mutation ENFORCE_BY_TRY bounded assertion: a thread does not wait for the purger's lock
 * @mutation REPORTS_UNLOCKED bounded assertion: the report of all heaps takes no heap's lock
 * @mutation REPORTS_UNCHECKED bounded assertion: no check follows a report of all heaps
 * @mutation BATCH_UNCHECKED bounded assertion: no check follows a larger batch
 * @mutation BATCH_UNLOCKED bounded assertion: a thread that checks changes the batch, without the purger's lock
 */
#define HEAPS 2

/* The batches, and how many pages a thread takes or gives back: as many as the larger batch allows, or more. */
#define SMALL 1
#define LARGE 4
#define FEW LARGE
#define MANY 5

#define THREADS 2

bool lock[HEAPS], purger_lock;
/* Under each heap's lock. */
short used[HEAPS], free[HEAPS];
short reported_used[HEAPS], reported_free[HEAPS];
/* Atomic. */
short total_used, total_free;
byte batch, max_batch;
byte heaps = 1;

/* What only the claims look at: the true sums, the size of the changes that are under way, and the threads in the
   allocator. */
short true_used, true_free;
byte in_flight, inside, finished;

/* At least the largest allowance, as MIN_LIMIT_PAGES and the batch ensure. */
#define LIMIT(used) ((used) + 2 * LARGE * HEAPS)

#define MAX(a, b) ((a) > (b) -> (a) : (b))
#define DIFFERENCE(a, b) ((a) > (b) -> (a) - (b) : (b) - (a))
#define ERROR (heaps * MAX(batch, max_batch) + in_flight)

inline check_error() {
    assert(DIFFERENCE(total_used, true_used) <= ERROR && DIFFERENCE(total_free, true_free) <= ERROR);
    assert(total_used >= 0 && total_free >= 0)
}

/* A thread leaves the allocator. */
inline come_to_rest() {
    inside--;
    assert(inside > 0 || true_free <= LIMIT(true_used))
}

#ifdef ALLOWANCE_ONE
#define ALLOWANCE (max_batch * heaps)
#elif defined ALLOWANCE_NOW
#define ALLOWANCE (2 * batch * heaps)
#else
#define ALLOWANCE (2 * max_batch * heaps)
#endif

/* The limit is read first. */
inline load_limit() {
    limit = LIMIT(total_used)
}

inline compare() {
    is_over = total_free > limit - ALLOWANCE;
    limit = 0
}

inline check_limit() {
#ifndef LIMIT_READ_EARLY
    load_limit();
#endif
    atomic { compare() }
}

/* The caller holds the heap's lock. */
inline add(total, reported, now) {
#ifdef ADD_BY_STORE
    seen = total;
    atomic {
        total = seen + now - reported;
        seen = 0;
        reported = now
    }
#elif defined REPORTED_AFTER_UNLOCK || defined REPORTS_UNLOCKED
    /* Another thread may work on the heap. */
    total = total + now - reported;
    reported = now
#else
    atomic {
        total = total + now - reported;
#ifndef REPORT_FORGOTTEN
        reported = now;
#endif
        check_error()
    }
#endif
}

inline report(h) {
    add(total_used, reported_used[h], used[h]);
#ifdef LIMIT_READ_EARLY
    load_limit();
#endif
    add(total_free, reported_free[h], free[h])
}

#ifdef ONLY_FREE
#define HAS_CHANGED(h) (DIFFERENCE(free[h], reported_free[h]) > batch)
#else
#define HAS_CHANGED(h) (DIFFERENCE(used[h], reported_used[h]) > batch || DIFFERENCE(free[h], reported_free[h]) > batch)
#endif
#ifdef START_UNREPORTED
#define IS_DUE(h) HAS_CHANGED(h)
#else
#define IS_DUE(h) (HAS_CHANGED(h) || reported_used[h] == 0)
#endif

/* The caller holds the heap's lock. Some free pages come into use, and some pages in use become free. */
inline begin_change(h, used_by, free_by) {
    size = free_by;
    used[h] = used[h] + used_by;
    free[h] = free[h] + size;
    true_used = true_used + used_by;
    true_free = true_free + size;
    size = MAX(DIFFERENCE(used_by, 0), DIFFERENCE(size, 0));
    in_flight = in_flight + size;
    assert(used[h] >= 0 && free[h] >= 0);
    check_error()
}

inline end_change() {
    in_flight = in_flight - size;
    size = 0;
    check_error()
}

inline report_if_due(h) {
    if
    :: IS_DUE(h) ->
#ifdef CHECK_EARLY
        check_limit();
        report(h)
#else
        report(h);
#ifdef BATCH_UNLOCKED
        if
        :: batch = SMALL + LARGE - batch; max_batch = MAX(batch, max_batch)
        :: true
        fi;
#endif
        check_limit()
#endif
    :: else -> skip
    fi
}

inline purge(h) {
    atomic {
        !lock[h] -> lock[h] = true;
        begin_change(h, 0, -free[h])
    }
    report(h);
    atomic { end_change(); lock[h] = false }
}

inline report_locked(h) {
#ifdef REPORTS_UNLOCKED
    report(h)
#else
    atomic { !lock[h] -> lock[h] = true }
    report(h);
    lock[h] = false
#endif
}

/* The caller holds the purger's lock. */
inline report_all() {
    largest = batch;
    report_locked(0);
    if
    :: heaps == HEAPS -> report_locked(1)
    :: heaps < HEAPS -> skip
    fi;
#ifdef BATCH_UNLOCKED
    largest = MAX(batch, largest);
#endif
    atomic { max_batch = largest; largest = 0 }
}

inline purge_to_limit() {
    do
    :: report_all();
        check_limit();
        if
        :: is_over -> purge(0); purge(1)
        :: else -> break
        fi
    od
}

inline enforce() {
#ifdef ENFORCE_BY_TRY
    if
    :: atomic { purger_lock -> is_over = false }
    :: atomic { !purger_lock -> purger_lock = true };
#else
        atomic { !purger_lock -> purger_lock = true }
#endif
        purge_to_limit();
        purger_lock = false
#ifdef ENFORCE_BY_TRY
    fi
#endif
}

#ifdef COUNTED_ELSEWHERE
#define COUNTING (1 - at)
#else
#define COUNTING at
#endif

/* Which pages change is chosen under the heap's lock. */
inline begin_operation() {
    inside++;
    if
    :: !lock[0] -> at = 0
    :: !lock[1] -> at = 1; heaps = HEAPS
    fi;
    lock[at] = true;
    if
    :: free[at] >= FEW -> begin_change(at, FEW, -FEW)
    :: free[at] < FEW -> begin_change(at, FEW, -free[at])
    :: used[COUNTING] >= FEW -> begin_change(COUNTING, -FEW, FEW)
    :: used[COUNTING] >= MANY -> begin_change(COUNTING, -MANY, MANY)
    fi
}

proctype thread(byte operations) {
    short size, limit;
    byte at, largest;
    bool is_over;
#ifdef ADD_BY_STORE
    short seen;
#endif

    do
    :: atomic { operations > 0 && (!lock[0] || !lock[1]) -> operations--; begin_operation() }
#ifdef REPORTED_AFTER_UNLOCK
        lock[at] = false;
        report_if_due(at);
        atomic { end_change() }
#else
        report_if_due(at);
        atomic { end_change(); lock[at] = false }
#endif
        if
        :: is_over -> enforce()
        :: else -> skip
        fi;
        atomic { at = 0; come_to_rest() }
    :: operations == 0 -> break
    od;
    finished++
}

/* An epoch ends at any time. All heaps report when all threads are done. */
proctype epoch() {
    short size, limit;
    byte largest;
    bool is_over;
#ifdef ADD_BY_STORE
    short seen;
#endif

    atomic { !purger_lock -> purger_lock = true; inside++ }
    if
    :: batch = SMALL;
        goto checked
    :: batch = LARGE;
        max_batch = LARGE;
#ifdef BATCH_UNCHECKED
        goto checked
#endif
    :: true
    fi;
#ifdef REPORTS_UNCHECKED
    report_all();
#else
    purge_to_limit();
#endif
checked:
    purger_lock = false;
    atomic { come_to_rest() }
    finished == THREADS;
    report_all();
    assert(total_used == true_used && total_free == true_free);
    finished++
}

init {
    atomic {
        if
        :: used[0] = 14; free[0] = LIMIT(14) - 9
        :: used[0] = 9; used[1] = 5; free[0] = LIMIT(14) - 19; heaps = HEAPS
        :: used[0] = 9; used[1] = 5; free[0] = LIMIT(14) - 17; heaps = HEAPS
        fi;
        if
        :: batch = SMALL
        :: batch = LARGE
        fi;
        max_batch = batch;
        reported_used[0] = used[0];
        reported_used[1] = used[1];
        reported_free[0] = free[0];
        total_used = used[0] + used[1];
        total_free = free[0];
        true_used = total_used;
        true_free = total_free;
        run thread(2);
        run thread(1);
        run epoch()
    }
}

active proctype quiet() {
    timeout;
    assert(finished == THREADS + 1 && in_flight == 0);
    assert(!lock[0] && !lock[1] && !purger_lock)
}
