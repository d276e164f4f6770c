/*
 * Versions: how an address space learns that all cores have flushed everything since an access bit was cleared. One
 * page-table entry, whose software entry is the version that was read when accessed was cleared; three cores that
 * come, go away with their translations kept (another address space runs), return, and leave for good.
 *
 *   come                            flush everything (interrupts off)       leave (interrupts off)
 *     users += core                   waited = core is in pending             load another address space
 *     load the address space          flush                                   flush
 *                                     lock                                    users -= core
 *   version of an entry               pending -= core, if waited              lock
 *     clear accessed                  pending empty?                          pending -= core
 *     read the version                  version++; pending = users            pending empty? as on the left
 *                                     unlock                                  unlock
 *
 * A core is struck off pending by itself only, and only if it was there before it flushed: otherwise the flush may be
 * one of the version before. Who comes is not waited for in this version: hence an entry is flushed from all TLBs when
 * two versions have begun since its own, and not when one has. The version is advanced before users are read: who
 * comes later than that finds the new one. Whoever flushes and finds nobody waited for advances the version, even if it
 * was not waited for itself: pending is empty at first, and again when all have left.
 *
 * Software entries have six values here for 128 of the kernel: 0 is none, the last UNCACHED, and those between are
 * versions, after the last of which comes the first. Once round, an entry looks fresh again, and is flushed needlessly.
 *
 * Abstracted: hardware sets accessed and fills the TLB in one step (see decision.pml), and forgets nothing, which would
 * make no claim harder; a flush for the entry reaches all that hold it at once. Who looks whether it is waited for
 * flushes in the same step: what comes between leaves less in TLBs, not more.
 *
 * @claim gone safety: what is not flushed is in no TLB; who has left is not waited for
 * @claim advances ltl BUSY: where all cores flush, or leave and come, again and again, so do versions (weak fairness)
 * @mutation GAP_ONE gone assertion: one version later no core is flushed any more
 * @mutation VERSION_EARLY gone assertion: the version is read before accessed is cleared
 * @mutation WAITED_LATE gone assertion: a core looks whether it is waited for after its flush
 * @mutation INTERRUPTIBLE gone assertion: an interrupt's own flush comes between its flush and saying so
 * @mutation FLUSH_LATE gone assertion: it says that it has flushed before it does
 * @mutation NO_LOCK gone assertion: two cores find that nobody is waited for, and both advance the version
 * @mutation USERS_EARLY gone assertion: users are read before the version is advanced
 * @mutation NOT_ENTERED gone assertion: who comes is not a user
 * @mutation ENTERED_LATE gone assertion: it is one only after it has loaded the address space
 * @mutation AWAY_OVERLOOKED gone assertion: who is away with what it has cached is no user
 * @mutation LEFT_FULL gone assertion: who leaves does not flush, and returns
 * @mutation LEFT_LOADED gone assertion: who leaves flushes while it can still load translations
 * @mutation LEFT_EARLY gone assertion: who leaves flushes when it is no user any more
 * @mutation PENDING_FIRST gone assertion: who leaves is struck off pending before users
 * @mutation WRAP_TO_RESERVED gone assertion: versions go through all values
 * @mutation WRAP_BY_BITS gone assertion: the gap is taken modulo the number of values, not of versions
 * @mutation LAST_ONLY advances cycle: only who was waited for advances the version, and all have left
 */
#define CORES 3
#define BIT (1 << _pid)

/* Versions are 1 to VERSIONS; a software entry can have two values more. */
#define VERSIONS 4
#define NONE 0
#define UNCACHED 5
#define VALUES 6
#ifdef WRAP_TO_RESERVED
#define NEXT(version) (((version) + 1) % VALUES)
#else
#define NEXT(version) ((version) % VERSIONS + 1)
#endif
#if defined WRAP_TO_RESERVED || defined WRAP_BY_BITS
#define AGE(version, now) (((now) + VALUES - (version)) % VALUES)
#else
#define AGE(version, now) (((now) + VERSIONS - (version)) % VERSIONS)
#endif
#ifdef GAP_ONE
#define GAP 1
#else
#define GAP 2
#endif

/* The entry, its software entry. */
bool present = true, accessed;
byte software = NONE;

/* Sets of cores: those with the address space loaded, those with the entry in their TLB. */
byte loaded, cached;

byte version = 1, users, pending;
bool locked;
#ifdef AWAY_OVERLOOKED
#define WAITED_FOR (users & loaded)
#else
#define WAITED_FOR users
#endif

ltl advances { []<> (version == 1) && []<> (version == 2) }

inline come() {
#ifdef ENTERED_LATE
    loaded = loaded | BIT;
    users = users | BIT
#else
#ifndef NOT_ENTERED
    users = users | BIT;
#endif
    loaded = loaded | BIT
#endif
}

inline strike_off() {
    pending = pending & ~waited;
    waited = 0
}

#ifdef LAST_ONLY
#define NOBODY_LEFT ((pending & waited) != 0 && (pending & ~waited) == 0)
#else
#define NOBODY_LEFT ((pending & ~waited) == 0)
#endif

/* If nobody is waited for any more, the next version begins. */
inline settle() {
#ifdef NO_LOCK
    strike_off();
    if
    :: pending == 0 ->
        version = NEXT(version);
        pending = users
    :: else -> skip
    fi
#elif defined USERS_EARLY
    if
    :: atomic { !locked && NOBODY_LEFT -> strike_off(); locked = true; pending = users };
        atomic { version = NEXT(version); locked = false }
    :: atomic { !locked && !NOBODY_LEFT -> strike_off() }
    fi
#else
    if
    :: atomic { !locked && NOBODY_LEFT -> strike_off(); locked = true; version = NEXT(version) };
        atomic { pending = WAITED_FOR; locked = false }
    :: atomic { !locked && !NOBODY_LEFT -> strike_off() }
    fi
#endif
}

inline flush() {
    cached = cached & ~BIT
}

inline flush_everything() {
#ifdef WAITED_LATE
    flush();
    waited = pending & BIT;
    settle()
#elif defined FLUSH_LATE
    waited = pending & BIT;
    settle();
    flush()
#else
    atomic { waited = pending & BIT; flush() };
#ifdef INTERRUPTIBLE
    if
    :: true ->
        outer = waited;
        atomic { waited = pending & BIT; flush() };
        settle();
        waited = outer;
        outer = 0
    :: true -> skip
    fi;
#endif
    settle()
#endif
}

inline leave() {
#ifdef LEFT_LOADED
    flush();
#endif
    atomic {
        loaded = loaded & ~BIT;
#if !defined LEFT_FULL && !defined LEFT_LOADED && !defined LEFT_EARLY
        flush()
#endif
    };
#ifndef PENDING_FIRST
    users = users & ~BIT;
#endif
#ifdef LEFT_EARLY
    flush();
#endif
    waited = BIT;
    settle();
#ifdef PENDING_FIRST
    users = users & ~BIT;
#endif
    assert((pending & BIT) == 0)
}

active [CORES] proctype core() {
    byte waited;
#ifdef INTERRUPTIBLE
    byte outer;
#endif

    do
    :: come();
        do
        :: flush_everything()
        :: leave(); break
#ifndef BUSY
        /* It goes away, or returns. */
        :: loaded = loaded ^ BIT
#endif
        od
    od
}

#define HARDWARE(core) \
    :: d_step { present && (loaded & (1 << core)) != 0 -> accessed = true; cached = cached | (1 << core) }

/* Where versions have only to go on, there is no entry. */
#ifndef BUSY
active proctype hardware() {
    do
    HARDWARE(0)
    HARDWARE(1)
    HARDWARE(2)
    od
}

active proctype kernel() {
    byte now;

    do
    /* Clear accessed. */
#ifdef VERSION_EARLY
    :: atomic { accessed -> now = version };
        atomic { accessed = false; software = now; now = 0 }
#else
    :: atomic { accessed -> accessed = false };
        software = version
#endif
    /* Unmap the page, and map another, with accessed clear. */
    :: atomic { present = false; now = accessed; accessed = false };
        atomic {
            if
            :: !now && (software == UNCACHED || software != NONE && AGE(software, version) >= GAP) ->
                assert(cached == 0)
            :: else -> cached = 0
            fi;
            now = 0;
            software = UNCACHED;
            present = true
        }
    od
}
#endif
