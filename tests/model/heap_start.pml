/*
 * The lazy start of a heap other than the first: a thread that needs it tries a lock, and initializes the heap under
 * it; meanwhile the others use the first heap. Forks may come at any moment.
 *
 *   thread                                    fork
 *     state is READY? use the heap              lock the start
 *     state is UNUSED? try to lock the start      in a handler that interrupted the start: the thread has the lock
 *       locked, and still UNUSED?                 in one that interrupted a holder of another lock: wait, unless the
 *         state = STARTING                          flag of another fork is on the lock
 *         initialize all parts                  lock the purger (heaps.pml)
 *         started = 2                           lock all heaps below `started` that are READY (heaps.pml)
 *         state = READY                         after the fork, in the parent: clear all flags; unlock the heaps, the
 *           or FAILED if the kernel refuses       purger, and the start
 *       unlock the start                        in the child: free the locks that other threads held
 *     not READY? use the first heap
 *
 * A fork that holds no lock waits for the start's lock, flagged or not. If it did not, the other fork might end, and a
 * heap might start after that. A fork in a handler need not wait for a flagged lock, since the other fork is going to
 * wait for the interrupted section. So in the child no heap is STARTING, unless the forking thread itself was starting
 * it. The start then continues after the handler.
 *
 * `started` changes before the state. Otherwise a handler that interrupts the start between the two might fork without
 * the lock of a heap that other threads use already.
 *
 * Memory: a store to a part becomes visible at any later time. Release: a store of the state waits until all parts are
 * visible; acquire: the parts are loaded after the state. A child lacks the stores of other threads that were not yet
 * visible. All else is sequentially consistent.
 *
 * Two forks at the same time may wait for each other if both are in handlers that interrupted a holder of a lock
 * (HANDLERS_OF_BOTH; docs/known-problems.md). The claim leaves this case out.
 *
 * Abstracted: two heaps, one of them lazy, and all threads need that one; two parts; at most two forks, one of them
 * with a child; no caches and no depots.
 *
 * @claim started safety: no thread uses a heap that is partly initialized, none is started twice, no thread waits for a
 *   start, and the child of a fork uses no heap that another thread was changing or starting
 * @mutation START_UNLOCKED started assertion: a thread starts a heap without the lock
 * @mutation STATE_UNCHECKED started assertion: a thread does not load the state again under the lock
 * @mutation START_AWAITED started assertion: a thread waits for the lock, even in a handler
 * @mutation READY_RELAXED started assertion: READY may be visible before the parts
 * @mutation READY_UNORDERED_LOAD started assertion: a thread loads the parts before the state (no acquire)
 * @mutation READY_EARLY started assertion: the state is READY before the last part is stored
 * @mutation READY_UNCOUNTED started assertion: the state is READY before `started` changes
 * @mutation FAILED_KEPT started assertion: after a refused start the state stays STARTING
 * @mutation FORK_BESIDE_START started assertion: a fork does not lock the start
 * @mutation FORK_HEAPS_FIRST started assertion: it locks the start last
 * @mutation FORK_PASSES_START started assertion: a fork that holds no lock does not wait for a flagged one either; its
 *   child makes a heap UNUSED that another thread was starting
 * @mutation FORK_LOCKS_FIRST started assertion: a fork locks only the first heap
 * @mutation FLAGS_KEPT started assertion: a fork releases each lock with its flag
 * @mutation HANDLER_WAITS_FOR_FORKS started assertion: in a handler a fork waits for flagged locks, too
 * @mutation HANDLER_SKIPS_HELD started assertion: in a handler a fork does not wait for a lock, flagged or not
 * @mutation HANDLERS_OF_BOTH started assertion: two forks are in handlers that interrupted holders of locks
 * @mutation START_NOT_FREED started assertion: the child does not free the start's lock that another fork held
 * @mutation STARTING_RESET started assertion: the child makes a heap UNUSED that the forking thread was starting
 */
#define HEAPS 2
#define PARTS 2
#define THREADS 3
#define VISITS 2
#define FORKS 2

/* Locks: one for each heap, the purger's, and the start's. */
#define PURGER HEAPS
#define START (HEAPS + 1)
#define LOCKS (HEAPS + 2)
#define NONE 15

mtype = { UNUSED, STARTING, READY, FAILED };

mtype state = UNUSED;
byte started = 1;
/* Memory as all see it, and a store buffer for each thread. */
byte part[PARTS];
#define BUFFERS (THREADS * PARTS)
#define SLOT(thread, i) ((thread) * PARTS + (i))
bool held[BUFFERS];
byte value[BUFFERS];

/* The flag is in the lock's word, which a release clears. */
bool lock[LOCKS], flag[LOCKS];

/* For each thread: the lock that it held when a signal came, or NONE; and whether it forks. */
byte interrupted[THREADS];
bool forks[THREADS];
bool child;
byte survivor;

/* What only the claims look at: the number of starts, whether the heap has been used, whether a thread is at work, and
   the threads in a handler that interrupted a holder of a lock. */
byte starts;
bool live, at_work[LOCKS];
byte begun, in_handlers, visits, finished;

#define ALL_VISIBLE (!held[SLOT(me, 0)] && !held[SLOT(me, 1)])

inline make_visible(slot) {
    part[(slot) % PARTS] = value[slot];
    held[slot] = false;
    value[slot] = 0
}

active proctype memory() {
end:
    do
    :: atomic { held[0] -> make_visible(0) }
    :: atomic { held[1] -> make_visible(1) }
    :: atomic { held[2] -> make_visible(2) }
    :: atomic { held[3] -> make_visible(3) }
    :: atomic { held[4] -> make_visible(4) }
    :: atomic { held[5] -> make_visible(5) }
    od
}

inline set_part(i) {
    atomic {
        !held[SLOT(me, i)] -> assert(!live);
        held[SLOT(me, i)] = true;
        value[SLOT(me, i)] = number
    }
}

inline forget_stores(thread) {
    if
    :: me != thread ->
        held[SLOT(thread, 0)] = false;
        held[SLOT(thread, 1)] = false;
        value[SLOT(thread, 0)] = 0;
        value[SLOT(thread, 1)] = 0
    :: else -> skip
    fi
}

inline enter(h) {
    atomic {
        !lock[h] -> lock[h] = true;
        assert(!at_work[h]);
        at_work[h] = true
    }
}

inline leave(h) {
    atomic {
        at_work[h] = false;
        lock[h] = false
    }
}

#define MAY_FORK (begun < FORKS && !child)
#ifdef HANDLERS_OF_BOTH
#define MAY_INTERRUPT true
#else
#define MAY_INTERRUPT (in_handlers == 0)
#endif

inline use_first() {
    enter(0);
    leave(0)
}

inline use_second() {
    enter(1);
    atomic {
#ifdef READY_UNORDERED_LOAD
        assert(loaded[0] != 0 && loaded[0] == loaded[1]);
#else
        assert(part[0] != 0 && part[0] == part[1]);
#endif
        live = true
    }
    leave(1)
}

inline load_state() {
#ifdef READY_UNORDERED_LOAD
    loaded[0] = part[0];
    loaded[1] = part[1];
#endif
    seen = state
}

/* A signal handler that interrupts the start may fork, and allocates. */
inline handle_signal() {
    if
    :: atomic { MAY_INTERRUPT -> in_handlers++; interrupted[me] = START };
        if
        :: atomic { MAY_FORK -> begun++; forks[me] = true }; !forks[me]
        :: true
        fi;
#ifdef START_AWAITED
        state != UNUSED && state != STARTING;
#endif
        use_first();
        atomic { interrupted[me] = NONE; in_handlers-- }
    :: true
    fi
}

inline end_start() {
    if
    :: started = HEAPS;
        handle_signal();
#ifdef READY_RELAXED
        state = READY
#else
        atomic { ALL_VISIBLE -> assert(state == STARTING); state = READY }
#endif
#ifdef FAILED_KEPT
    :: true
#else
    :: atomic { ALL_VISIBLE -> assert(state == STARTING); state = FAILED }
#endif
    fi
}

/* The caller holds the start's lock. */
inline initialize() {
    atomic {
        assert(state == UNUSED);
        state = STARTING;
        starts++;
        number = starts
    }
    set_part(0);
    handle_signal();
#ifdef READY_EARLY
    end_start();
    set_part(1);
#else
    set_part(1);
#ifdef READY_UNCOUNTED
    atomic { ALL_VISIBLE -> state = READY }
    handle_signal();
    started = HEAPS;
#else
    end_start();
#endif
#endif
    number = 0
}

inline start() {
    if
#ifdef START_UNLOCKED
    :: true ->
#elif defined START_AWAITED
    :: atomic { !lock[START] -> lock[START] = true };
#else
    :: atomic { lock[START] -> skip }
    :: atomic { !lock[START] -> lock[START] = true };
#endif
        if
#ifdef STATE_UNCHECKED
        :: true -> initialize()
#else
        :: state == UNUSED -> initialize()
        :: state != UNUSED -> skip
#endif
        fi;
#ifndef START_UNLOCKED
        lock[START] = false
#endif
    fi
}

inline visit() {
    load_state();
    if
    :: seen == UNUSED -> start(); load_state()
    :: seen != UNUSED -> skip
    fi;
    if
    :: seen == READY -> use_second()
    :: seen != READY -> use_first()
    fi;
    seen = 0
}

inline wait_for(i) {
    atomic { !lock[i] -> lock[i] = true; acquired[i] = true }
    flag[i] = true
}

inline wait_unless_forking(i) {
#ifdef HANDLER_WAITS_FOR_FORKS
    wait_for(i)
#else
    if
    :: atomic { !lock[i] -> lock[i] = true; acquired[i] = true }; flag[i] = true
#ifdef HANDLER_SKIPS_HELD
    :: lock[i] -> skip
#else
    :: flag[i] -> skip
#endif
    fi
#endif
}

inline lock_start() {
#ifndef FORK_BESIDE_START
    if
    :: interrupted[me] == START -> skip
#ifndef FORK_PASSES_START
    :: interrupted[me] == NONE -> wait_for(START)
    :: interrupted[me] <= PURGER -> wait_unless_forking(START)
#else
    :: interrupted[me] != START -> wait_unless_forking(START)
#endif
    fi
#else
    skip
#endif
}

inline lock_purger() {
    if
    :: interrupted[me] == PURGER -> skip
    :: atomic { interrupted[me] != PURGER && !lock[PURGER] -> lock[PURGER] = true; acquired[PURGER] = true }
    :: interrupted[me] < PURGER && lock[PURGER] -> skip
    fi
}

inline lock_heap(h) {
    if
    :: interrupted[me] == h -> skip
    :: interrupted[me] >= PURGER -> wait_for(h)
    :: interrupted[me] == 1 - h -> wait_unless_forking(h)
    fi
}

inline lock_heaps() {
    lock_heap(0);
#ifndef FORK_LOCKS_FIRST
    if
    :: started == HEAPS && state == READY -> lock_heap(1)
    :: !(started == HEAPS && state == READY) -> skip
    fi
#endif
}

inline free_in_child(i) {
    if
    :: !acquired[i] -> flag[i] = false; lock[i] = (interrupted[me] == i)
    :: else -> skip
    fi
}

inline start_child() {
    d_step {
        assert(!at_work[0] || interrupted[me] == 0);
        assert(!at_work[1] || interrupted[me] == 1);
#ifdef FORK_PASSES_START
        if
        :: state == STARTING && interrupted[me] != START -> state = UNUSED; part[0] = 0; part[1] = 0
        :: else -> skip
        fi;
#endif
#ifdef STARTING_RESET
        if
        :: state == STARTING -> state = UNUSED
        :: else -> skip
        fi;
#endif
        assert(state != STARTING || interrupted[me] == START);
        free_in_child(0);
        free_in_child(1);
        free_in_child(PURGER);
#ifndef START_NOT_FREED
        free_in_child(START)
#endif
    }
}

inline clear_flag(i) {
    if
    :: acquired[i] -> flag[i] = false
    :: else -> skip
    fi
}

inline release(i) {
    if
    :: acquired[i] -> atomic { lock[i] = false; flag[i] = false; acquired[i] = false }
    :: else -> skip
    fi
}

/* What a thread does that forks. */
proctype forker(byte me) {
    bool acquired[LOCKS];

    {
end:
        do
        :: forks[me] ->
#ifdef FORK_HEAPS_FIRST
            lock_purger();
            lock_heaps();
            lock_start();
#else
            lock_start();
            lock_purger();
            lock_heaps();
#endif
            if
            :: atomic {
                   ALL_VISIBLE && !child -> survivor = me;
                   forget_stores(0);
                   forget_stores(1);
                   forget_stores(2);
                   child = true
               };
               finished == 2 * (THREADS - 1);
               start_child()
            :: true
            fi;
#ifndef FLAGS_KEPT
            clear_flag(0);
            clear_flag(1);
            clear_flag(START);
#endif
            release(0);
            release(1);
            release(PURGER);
            release(START);
            forks[me] = false
        od
    } unless {
        atomic { child && survivor != me -> finished++ }
    }
}

proctype thread(byte me) {
    mtype seen;
    byte number;
#ifdef READY_UNORDERED_LOAD
    byte loaded[PARTS];
#endif

    {
        do
        :: atomic { visits < VISITS -> visits++ }; visit()
        :: atomic { MAY_FORK -> begun++; forks[me] = true }; !forks[me]
        :: atomic { MAY_FORK && MAY_INTERRUPT -> begun++; in_handlers++ };
            if
            :: enter(0); interrupted[me] = 0
            :: atomic { state == READY -> interrupted[me] = 1 }; enter(1)
            :: atomic { !lock[PURGER] -> lock[PURGER] = true; interrupted[me] = PURGER }
            fi;
            atomic { forks[me] = true; !forks[me] -> leave(interrupted[me]); interrupted[me] = NONE; in_handlers-- }
        :: atomic { visits == VISITS -> break }
        od;
        finished++
    } unless {
        atomic { child && survivor != me -> finished++ }
    }
}

init {
    atomic {
        interrupted[0] = NONE;
        interrupted[1] = NONE;
        interrupted[2] = NONE;
        run thread(0);
        run thread(1);
        run thread(2);
        run forker(0);
        run forker(1);
        run forker(2)
    }
}

active proctype quiet() {
    timeout;
    assert(finished == (child -> 2 * THREADS - 1 : THREADS) && state != STARTING);
    assert(state != READY || started == HEAPS);
    assert(!lock[0] && !lock[1] && !lock[PURGER] && !lock[START]);
    assert(!flag[0] && !flag[1] && !flag[START]);
    assert(!at_work[0] && !at_work[1])
}
