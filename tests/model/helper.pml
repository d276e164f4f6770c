/*
 * The helper thread (src/arena/helper.c): its start by a thread that leaves the heap, its own end, stops, forks, and
 * the end of the process.
 *
 *   thread that leaves the heap             helper                                   stop
 *     lock; work on the heap; unlock          seen = wakeup                            holds++
 *     read state; not RUNS?                   holds > 0? stand down, end               while RUNS, or the thread exists:
 *     compare-and-swap it -> RUNS             tick: purges under the lock                wakeup++, wake; wait
 *     holds > 0? put it back                  no work for a while?                     no helper runs, and none starts
 *     wait until the last helper is gone        RUNS -> AWAY or SINGLE                  holds--
 *     caches take locks; start a thread         lock; untouched since the tick? end
 *                                               else compare-and-swap it -> RUNS
 *                                             wait while wakeup == seen
 *
 * Memory: sequentially consistent. State, holds and wakeup are accessed by seq_cst operations, and all else under the
 * lock. Whether a visit of the heap sees the state that the helper left, or the helper sees the visit, is decided by
 * the order of their two critical sections.
 *
 * Abstracted: one lock for the heap, the purger and the caches; an epoch in which no thread came to the heap makes the
 * helper end; a stop wakes the helper once, where the code repeats that each millisecond, and waits without a time-out.
 * No thread is created between the count of threads and the state SINGLE that follows from it. Children of vfork, and
 * those that the C library's handlers do not see, are left out.
 *
 * @claim tidy safety: what other threads left is purged, and so is what may stay only beside a helper; the only thread
 *   omits locks while no helper runs; a forked child can do all this anew
 * @claim stopped safety STOPS: during a stop no helper exists or starts; a helper that sleeps for good is woken
 * @claim ended safety ENDS: after the end of the process no helper starts, unless one ran then
 * @claim finished ltl: every visit and fork comes to its end (weak fairness)
 * @claim obeyed ltl STOPS: so does every stop
 * @mutation LEAVE_UNCHECKED tidy assertion: the helper ends without a look at visits since its last tick
 * @mutation CHECK_BEFORE_STATE tidy assertion: the helper looks at these before it changes the state
 * @mutation RETURN_BY_STORE tidy assertion: the helper stores RUNS when it comes back, beside a thread that starts another
 * @mutation START_BY_STORE tidy assertion: a thread stores RUNS when it starts a helper
 * @mutation LAST_NOT_GONE tidy assertion: a helper is started while the last one still exists
 * @mutation CACHES_LATE tidy assertion: the caches learn of the helper after that has started
 * @mutation CACHES_EARLY tidy assertion: the helper lets the only thread omit locks before its last purge
 * @mutation BACKGROUND_STAYS tidy assertion: the limit stays as high as beside a helper after the helper has ended
 * @mutation FORK_WITHOUT_HOLD tidy assertion: a helper may start while the only thread forks without locks
 * @mutation FORGET_THREAD tidy assertion: the child waits for the parent's helper to be gone
 * @mutation FORGET_STATE tidy assertion: the child takes the parent's helper for its own
 * @mutation FORGET_HOLDS tidy assertion: the child starts no helper, since its parent held it during the fork
 * @mutation START_UNHELD stopped assertion: a thread that starts a helper does not look for stops after it set RUNS
 * @mutation STOP_BY_STATE stopped assertion: a stop waits for the state only
 * @mutation STOP_BY_THREAD stopped assertion: a stop waits for the thread only
 * @mutation STOP_REVERSED stopped assertion: a stop waits for the thread before it waits for the state
 * @mutation SEEN_LATE stopped assertion: the helper reads the wakeup's word after it looked for stops
 * @mutation WAKEUP_STILL stopped assertion: a stop wakes without a change of the word
 * @mutation WAKE_MISSING stopped assertion: a stop changes the word without waking
 * @mutation END_BY_STORE ended assertion: the end of the process stores its state over RUNS of a start under way
 * @mutation END_IGNORED ended assertion: a thread starts a helper also in the state of the end
 */
#define OTHER_VISITS 2
#define FIRST_VISITS 2

mtype = { NONE, RUNS, AWAY, SINGLE, ENDED, REFUSED };

mtype state = NONE;
byte holds;
/* Whether the helper's thread exists; whether the wakeup's word moved since the helper read it, and whether the helper
   sleeps on it. */
bool exists, moved, asleep;
bool lock;
/* Under the lock: whether more memory may stay as a helper will purge it; whether there is more; what other threads left
   free; whether a thread came since the last tick. */
bool background, excess, dirty, touched;
/* The caches' word: there is no helper, so the only thread takes no locks. */
bool no_helper = true;

/* The program: its first thread may be the only one; a fork's child replaces the process. */
bool other_ended, child;
/* A clone has been asked for; the helper was in the parent only. */
bool launched, vanished;

/* What only the claims look at. */
bool without_lock, stopping, ended, ran_at_end;
byte finished;

#define THREADS 2

ltl finished { <> (finished == THREADS) }
ltl obeyed { <> (finished == THREADS) }

inline take() {
    atomic { !lock -> lock = true }
}

inline stand_down(next) {
    take();
#ifndef BACKGROUND_STAYS
    background = false;
    excess = false;
#endif
    lock = false;
    atomic {
        assert(state == RUNS);
        state = next
    }
}

/* Looks whether a thread came to the heap since the last tick. */
inline look() {
    take();
    left = !touched;
    lock = false
}

/* The files of /proc say whether the first thread is alone. */
inline choose_next() {
    if
    :: other_ended -> next = SINGLE
    :: !other_ended -> next = AWAY
    fi
}

inline tick() {
    take();
    background = true;
    assert(!without_lock);
    quiet = !touched;
    touched = false;
    dirty = false;
    excess = false;
    lock = false
}

inline helper_run() {
    assert(state == RUNS && !stopping);
    do
    :: true ->
#ifndef SEEN_LATE
        moved = false;
#endif
        if
        :: holds > 0 ->
            choose_next();
            stand_down(next);
            break
        :: holds == 0 -> skip
        fi;
#ifdef SEEN_LATE
        moved = false;
#endif
#ifdef CACHES_EARLY
        no_helper = true;
#endif
        tick();
        if
        :: quiet ->
            choose_next();
#ifdef CHECK_BEFORE_STATE
            look();
            stand_down(next);
#else
            stand_down(next);
            look();
#endif
            if
#ifdef LEAVE_UNCHECKED
            :: true -> break
#else
            :: left -> break
            :: !left ->
                if
#ifdef RETURN_BY_STORE
                :: state = RUNS
#else
                :: atomic { state == next -> state = RUNS }
                :: atomic { state != next -> break }
#endif
                fi
#endif
            fi
        :: !quiet -> skip
        fi;
        atomic { asleep = !moved };
end_asleep:
        if
        :: !asleep
#ifndef STOPS
        :: asleep -> asleep = false
#endif
        fi
    od;
    no_helper = true;
    exists = false
}

active proctype helper() {
    mtype next;
    bool quiet, left;

end:
    do
    :: atomic { launched -> launched = false };
        {
            helper_run()
        } unless {
            atomic { vanished -> vanished = false; asleep = false; next = 0; quiet = false; left = false }
        }
    od
}

/* A thread that leaves the heap starts the helper if its state is the one that it saw. */
inline launch() {
    if
#ifdef START_BY_STORE
    :: atomic { state = RUNS; won = true }
#else
    :: atomic { state == seen -> state = RUNS; won = true }
    :: atomic { state != seen -> skip }
#endif
    fi;
    if
    :: won ->
        assert(!ended || ran_at_end);
        won = false;
        if
#ifndef START_UNHELD
        :: holds > 0 ->
            atomic {
                assert(state == RUNS);
                state = seen
            }
        :: holds == 0 ->
#else
        :: true ->
#endif
#ifndef LAST_NOT_GONE
            !exists;
#endif
#ifndef CACHES_LATE
            no_helper = false;
#endif
            take();
            background = true;
            lock = false;
            if
            :: atomic { assert(!exists && !stopping); exists = true; launched = true };
#ifdef CACHES_LATE
                no_helper = false;
#endif
                started = true
            :: true -> /* The kernel refuses. */
                take();
                background = false;
                excess = false;
                lock = false;
                no_helper = true;
                atomic {
                    assert(state == RUNS);
                    state = REFUSED
                }
            fi
        fi
    :: !won -> skip
    fi
}

/* wants: it holds more free memory than may stay without a helper. */
inline visit(is_first, wants) {
    started = false;
    take();
    touched = true;
    over = wants && !background;
    excess = excess || wants && background;
    dirty = dirty || !is_first;
    lock = false;
    seen = state;
    if
    :: holds == 0 && (seen == AWAY || seen == REFUSED || (seen == NONE || seen == SINGLE) && (over || !is_first)) -> launch()
#ifdef END_IGNORED
    :: seen == ENDED -> launch()
#endif
    :: else -> skip
    fi;
    seen = 0;
    over = false
}

/* An operation on the caches; outside of it the first thread starts helpers. */
inline use_cache() {
    if
    :: no_helper && other_ended ->
        without_lock = true;
        without_lock = false
    :: else -> take(); lock = false
    fi
}

active proctype other() {
    mtype seen;
    bool won, started, over;
    byte visits;

    {
        do
        :: visits < OTHER_VISITS -> visits++; visit(false, false)
        :: true -> break
        od;
        atomic { other_ended = true; finished++ }
    } unless {
        child
    }
}

/* The child of a fork: the helper and other threads are the parent's. */
inline forget() {
    atomic {
        child = true;
        finished = finished + !other_ended;
        other_ended = true;
        vanished = exists && !launched;
        launched = false
    }
    !vanished;
#ifndef FORGET_THREAD
    exists = false;
#endif
    no_helper = true;
#ifndef FORGET_HOLDS
    holds = 0;
#endif
#ifndef FORGET_STATE
    state = NONE;
#endif
    background = false;
    excess = false;
    dirty = false
}

/* Where no other thread exists the fork takes no locks. A handler of the program's may visit the heap before it. */
inline fork() {
    if
    :: other_ended && state != RUNS && !exists ->
#ifndef FORK_WITHOUT_HOLD
        holds++;
#endif
        visit(true, true);
        if
        :: forget()
        :: true ->
#ifndef FORK_WITHOUT_HOLD
            holds--
#endif
        fi
    :: else ->
        take();
        if
        :: forget()
        :: true
        fi;
        lock = false
    fi
}

inline stop() {
    holds++;
    if
    :: state == RUNS || exists ->
#ifndef WAKEUP_STILL
        moved = true;
#endif
#ifndef WAKE_MISSING
        asleep = false;
#endif
        skip
    :: else -> skip
    fi;
#ifdef STOP_BY_STATE
    state != RUNS;
#elif defined STOP_BY_THREAD
    !exists;
#elif defined STOP_REVERSED
    !exists;
    state != RUNS;
#else
    state != RUNS;
    !exists;
#endif
    stopping = true;
    assert(!exists);
    stopping = false;
    holds--
}

inline end_process() {
    do
    :: atomic {
           state == RUNS -> ended = true;
           ran_at_end = true
#ifdef END_BY_STORE
           ; state = ENDED; ran_at_end = false
#endif
       };
       break
    :: atomic { state != RUNS -> state = ENDED; ended = true };
       break
    od
}

active proctype first() {
    mtype seen;
    bool won, started, over, forked;
    byte visits;

    do
    :: visits < FIRST_VISITS ->
        visits++;
        use_cache();
        if
        :: visit(true, true)
        :: visit(true, false)
        fi
#if !defined STOPS && !defined ENDS
    :: !forked -> forked = true; fork()
#endif
#ifdef STOPS
    :: visits < FIRST_VISITS -> visits++; stop()
#endif
    :: visits == FIRST_VISITS -> break
    od;
#ifdef ENDS
    end_process();
#endif
    finished++
}

active proctype quiet_process() {
    timeout;
    assert(finished == THREADS && !lock && holds == 0);
    assert(state != RUNS || exists);
    assert(no_helper || exists);
#ifndef STOPS
    assert(!excess);
    assert(!dirty || ended || state == REFUSED)
#endif
}
