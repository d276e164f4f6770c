/*
 * The totals of several heaps, and the limit on free pages. Each heap counts its pages in use and its free resident
 * pages under its lock. It reports both to the totals of all heaps when the pages that it holds, used or free, have
 * changed by more than a batch since its last report, or when the used ones have grown by more. So a heap whose pages
 * only become free, or are used again, reports nothing.
 *
 *   thread, under a heap's lock                       holder of the purger's lock
 *     used and free change; it stores both              purge to the limit:
 *     a report is due?                                    adapt the batch to the limit's form
 *       totals += change                                  report of all heaps, each under its lock
 *       peak = max(peak, used)                              max_batch = batch
 *       is over, or the form is another one?              is over? for each heap: lock; take its free pages; report;
 *         after unlock: lock the purger;                    unlock; and again from the start
 *         purge to the limit                            change of the batch, or of the limit's form:
 *   is over:                                              set it; max_batch = max(max_batch, batch)
 *     total_free > limit(total_used)                      purge to the limit
 *                    - max_batch * heaps
 *
 * The total of the used pages counts what the heaps used at their last reports, not at one time. So before it raises
 * the peak, a thread adds up what the heaps have stored, and counts no more pages as used than that.
 *
 * The limit has one of two forms. With the first one, free pages may be as many as the peak exceeds the pages in use,
 * and a constant: only the pages held matter. With the second one, free pages may not exceed a constant. The batch is
 * then 0, and each change is reported. An epoch changes the form, or a thread that raises the peak.
 *
 * The total of the pages held differs from the true sum by at most max_batch for each heap, and by the changes of
 * threads that have not decided yet whether to report: one change for each heap at most. max_batch is the largest batch
 * since all heaps reported. At rest, when no thread is in the allocator, free pages do not exceed the limit.
 *
 * A check follows each change of what it depends on: a report, another batch, another form, one heap more. Only a
 * holder of the purger's lock changes the batch. Otherwise max_batch may fall, at the end of the report of all heaps,
 * below a batch that became larger meanwhile.
 *
 * Memory: sequentially consistent. Both totals are in one word, to which a thread adds atomically. It compares what the
 * addition returned, so that the last one to report sees what all have reported.
 *
 * Abstracted: two heaps, which stand for some of many (the batch of a single heap is 0); the second one may start with
 * its first change; the peak does not fall; no slack is added to what the heaps have stored, and their sum is read at
 * once; the constants are at least as high as the allowance; the batch changes at will; a purge keeps nothing, and is not
 * refused. Its system call is left out, since pages leave the count of free pages when a purge takes them.
 *
 * @claim bounded safety: at rest, free pages do not exceed the limit; the totals are as exact as stated above, and
 *   never negative; a report of all heaps makes them exact; the peak is of one time
 * @mutation ADD_BY_STORE bounded assertion: a total is loaded and stored, instead of an atomic addition
 * @mutation REPORTED_AFTER_UNLOCK bounded assertion: a change is reported after the release of the heap's lock
 * @mutation REPORT_FORGOTTEN bounded assertion: a heap does not note what it has reported
 * @mutation ONLY_USED bounded assertion: a heap reports only if its used pages have grown by more than a batch
 * @mutation FORM_LAGS bounded assertion: the batch stays as it is, although free pages may not exceed a constant
 * @mutation FORM_UNCHECKED bounded assertion: no check follows another form of the limit
 * @mutation FORM_UNSEEN bounded assertion: a thread that raises the peak does not see that the form is another one
 * @mutation PEAK_OF_REPORTS bounded assertion: the peak is raised to the total of the reports
 * @mutation START_UNREPORTED bounded assertion: a heap that has not reported yet reports like any other
 * @mutation COUNTED_ELSEWHERE bounded assertion: freed pages are counted at a heap other than their own
 * @mutation CHECK_EARLY bounded assertion: a thread loads the totals before it adds to them
 * @mutation ALLOWANCE_NONE bounded assertion: the check does not allow for the error
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

/* At the start. */
#define USED 9
#define PEAK 20

bool lock[HEAPS], purger_lock;
/* Under each heap's lock. */
short used[HEAPS], free[HEAPS];
short reported_used[HEAPS], reported_free[HEAPS];
/* Atomic. */
short stored_used[HEAPS];
short total_used, total_free, peak;
byte batch, max_batch;
byte heaps = 1;
bool is_constant; /* the limit's form */

/* What only the claims look at: the true sums, the size of the changes that are under way, and the threads in the
   allocator. */
short true_used, true_free, true_peak;
byte in_flight, inside, finished;

/* At least the largest allowance, as MIN_LIMIT_PAGES and the batch ensure. */
#define ROOM (2 * LARGE * HEAPS)
#define LIMIT(used) (is_constant -> ROOM : MAX(peak, used) + ROOM - (used))

#define MIN(a, b) ((a) < (b) -> (a) : (b))
#define MAX(a, b) ((a) > (b) -> (a) : (b))
#define DIFFERENCE(a, b) ((a) > (b) -> (a) - (b) : (b) - (a))
#define ERROR (heaps * MAX(batch, max_batch) + in_flight)

inline check_error() {
    assert(DIFFERENCE(total_used + total_free, true_used + true_free) <= ERROR && true_used <= total_used + ERROR);
    assert(total_used >= 0 && total_free >= 0)
}

/* What a thread that holds a heap's lock has not stored yet. */
#define FALL(h) (MAX(stored_used[h], used[h]) - used[h])

/* A thread leaves the allocator. */
inline come_to_rest() {
    inside--;
    assert(inside > 0 || true_free <= LIMIT(true_used))
}

#ifdef ALLOWANCE_NONE
#define ALLOWANCE 0
#elif defined ALLOWANCE_NOW
#define ALLOWANCE (batch * heaps)
#else
#define ALLOWANCE (max_batch * heaps)
#endif

inline load_totals() {
    seen_used = total_used;
    seen_free = total_free
}

/* The result is in seen_used and seen_free. */
inline raise_peak() {
    atomic {
        if
        :: seen_used > peak ->
#ifndef PEAK_OF_REPORTS
            seen_free = seen_free + seen_used;
            seen_used = MIN(seen_used, stored_used[0] + stored_used[1]);
            seen_free = seen_free - seen_used;
#endif
            assert(seen_used <= true_peak + FALL(0) + FALL(1));
            if
            :: seen_used > peak -> peak = seen_used
            :: seen_used > peak && !is_constant -> peak = seen_used; is_constant = true
            :: seen_used <= peak
            fi
        :: else -> skip
        fi
    }
}

inline check_limit() {
    atomic {
        is_over = seen_free > LIMIT(seen_used) - ALLOWANCE;
        seen_used = 0;
        seen_free = 0
    }
}

inline store(h) {
    stored_used[h] = used[h]
}

inline add(h) {
    store(h);
    total_used = total_used + used[h] - reported_used[h];
    total_free = total_free + free[h] - reported_free[h];
#ifndef REPORT_FORGOTTEN
    reported_used[h] = used[h];
    reported_free[h] = free[h];
#endif
#ifndef CHECK_EARLY
    load_totals();
#endif
}

/* The caller holds the heap's lock. */
inline report(h) {
#ifdef ADD_BY_STORE
    atomic { load_totals() }
    atomic {
        total_used = seen_used + used[h] - reported_used[h];
        total_free = seen_free + free[h] - reported_free[h];
        reported_used[h] = used[h];
        reported_free[h] = free[h];
        store(h);
        load_totals()
    }
#elif defined REPORTED_AFTER_UNLOCK || defined REPORTS_UNLOCKED
    /* Another thread may work on the heap. */
    atomic { total_used = total_used + used[h] - reported_used[h]; total_free = total_free + free[h] - reported_free[h] }
    atomic { reported_used[h] = used[h]; reported_free[h] = free[h]; store(h); load_totals() }
#else
    atomic { add(h); check_error() }
#endif
}

#ifdef ONLY_USED
#define HAS_CHANGED(h) (used[h] > reported_used[h] + batch)
#else
#define HAS_CHANGED(h) \
    (DIFFERENCE(used[h] + free[h], reported_used[h] + reported_free[h]) > batch || used[h] > reported_used[h] + batch)
#endif
#ifdef START_UNREPORTED
#define IS_DUE(h) HAS_CHANGED(h)
#else
#define IS_DUE(h) (batch == 0 || HAS_CHANGED(h) || reported_used[h] + reported_free[h] == 0)
#endif

/* The caller holds the heap's lock. Some free pages come into use, and some pages in use become free. */
inline begin_change(h, used_by, free_by) {
    size = free_by;
    used[h] = used[h] + used_by;
    free[h] = free[h] + size;
    true_used = true_used + used_by;
    true_peak = MAX(true_peak, true_used);
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
        atomic { load_totals() }
#endif
        report(h);
        raise_peak();
#ifdef BATCH_UNLOCKED
        if
        :: atomic { batch > 0 -> batch = SMALL + LARGE - batch; max_batch = MAX(batch, max_batch) }
        :: true
        fi;
#endif
        check_limit();
#ifndef FORM_UNSEEN
        atomic { is_over = is_over || (batch > 0 && is_constant) }
#endif
    :: else -> atomic { store(h) }
    fi
}

inline purge(h) {
    atomic {
        !lock[h] -> lock[h] = true;
        begin_change(h, 0, -free[h])
    }
    report(h);
    atomic { seen_used = 0; seen_free = 0; end_change(); lock[h] = false }
}

inline report_locked(h) {
#ifdef REPORTS_UNLOCKED
    report(h)
#else
    atomic { !lock[h] -> lock[h] = true }
    report(h);
    atomic { seen_used = 0; seen_free = 0; lock[h] = false }
#endif
}

/* The caller holds the purger's lock. */
inline report_all() {
    do
    ::
#ifdef FORM_LAGS
        largest = batch;
#else
        atomic { batch = (is_constant -> 0 : batch); largest = batch }
#endif
        report_locked(0);
        if
        :: heaps == HEAPS -> report_locked(1)
        :: heaps < HEAPS -> skip
        fi;
#ifdef BATCH_UNLOCKED
        largest = MAX(batch, largest);
#endif
        atomic { max_batch = largest; largest = 0; load_totals() }
        raise_peak();
#ifndef FORM_LAGS
        if
        :: is_constant && batch > 0 -> skip /* the peak has risen */
        :: !is_constant || batch == 0 -> break
        fi
#else
        break
#endif
    od
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
    :: begin_change(at, FEW, 0)
    :: begin_change(at, MANY, 0)
    :: free[at] >= FEW -> begin_change(at, FEW, -FEW)
    :: used[COUNTING] >= MANY -> begin_change(COUNTING, -MANY, MANY)
    fi
}

proctype thread(byte operations) {
    short size, seen_used, seen_free;
    byte at, largest;
    bool is_over;

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
    short size, seen_used, seen_free;
    byte largest;
    bool is_over;

    atomic { !purger_lock -> purger_lock = true; inside++ }
    if
    :: batch == LARGE -> batch = SMALL;
        goto checked
    :: batch == SMALL -> batch = LARGE;
        max_batch = LARGE;
#ifdef BATCH_UNCHECKED
        goto checked
#endif
    :: atomic { is_constant -> is_constant = false; batch = LARGE; max_batch = LARGE }
    :: !is_constant -> is_constant = true;
#ifdef FORM_UNCHECKED
        goto checked
#endif
    :: true
    fi;
#ifdef REPORTS_UNCHECKED
    report_all();
    atomic { seen_used = 0; seen_free = 0 }
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
        :: batch = SMALL; peak = PEAK
        :: batch = LARGE; peak = PEAK
        :: is_constant = true
        fi;
        max_batch = batch;
        reported_used[0] = USED;
        reported_free[0] = LIMIT(USED) - LARGE * HEAPS;
        used[0] = reported_used[0];
        free[0] = reported_free[0];
        if
        :: true
        :: heaps = HEAPS
        :: !is_constant -> used[0] = 0; free[0] = reported_free[0] + USED
        fi;
        total_used = reported_used[0];
        total_free = reported_free[0];
        true_used = used[0];
        true_free = free[0];
        stored_used[0] = used[0];
        true_peak = PEAK;
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
