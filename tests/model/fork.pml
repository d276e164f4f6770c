/*
 * Fork: the forking thread asks the server to park, waits until it has, takes the endpoints' locks, forks, and lets
 * all go again. One word says it all, RUN -> ASKED (forking thread) -> PARKED (server) -> RUN (forking thread), so
 * that the answer to one request is never taken for that to the next; one lock keeps forking threads apart. It is
 * taken before the request, as the C library lets the handlers of two forks run at once.
 *
 * The server parks with nothing in its hands and no lock held, and never waits for an endpoint's lock. It is rung
 * whatever its state says: sleep.pml says why.
 *
 * Abstracted: one endpoint; the server's work is to withdraw stock under the endpoint's lock; two threads fork, three
 * times in all. The memory is sequentially consistent: all of it is read-modify-writes of the word, the locks and the
 * bell.
 *
 * @claim whole safety: at the fork the server is at rest and nobody is within an endpoint; in the end all goes on
 * @claim finished ltl: every fork comes about (weak fairness)
 * @mutation NO_FORK_LOCK whole assertion: two forking threads share the word
 * @mutation TWO_FLAGS whole assertion: asked and parked are flags of their own: an old answer is taken for a new one
 * @mutation PARK_OVERLOOKED whole assertion: the server's second look before sleep leaves out the word
 * @mutation PARK_SILENT whole assertion: the request does not ring
 * @mutation ANSWER_SILENT whole assertion: the server's answer does not wake who asked
 * @mutation RELEASE_SILENT whole assertion: the end of the fork does not wake the server
 * @mutation PARKED_WITH_LOCK whole assertion: the server parks while it holds an endpoint's lock
 * @mutation LOCKS_FIRST whole assertion: the locks are taken before the request, and the server waits for locks
 * @mutation NO_LOCKS whole assertion: the endpoints' locks are not taken
 */
#define FORKERS 2
#define FORKS 3
#define PUSHES 2

mtype = { RUN, ASKED, PARKED };

mtype park = RUN;
bool bell_moved, server_waits_bell;
/* Who waits on the word: the server, and the forking threads. */
bool server_waits, forker_waits[FORKERS];
bool lock, fork_lock;
#ifdef TWO_FLAGS
bool asked, parked;
#define ANSWERED parked
#define REQUESTED asked
#else
#define ANSWERED (park == PARKED)
#define REQUESTED (park == ASKED)
#endif

/* What only the claims look at. */
bool at_rest, in_hands, pushing;
byte forks, finished;

#define THREADS (FORKERS + 1)

ltl finished { <> (finished == THREADS) }

inline take(which) {
    atomic { !which -> which = true }
}

inline wake_all() {
    d_step {
        server_waits = false;
        forker_waits[0] = false;
        forker_waits[1] = false
    }
}

proctype forker(byte me) {
    do
    :: atomic { forks < FORKS -> forks++ }
#ifndef NO_FORK_LOCK
        take(fork_lock);
#endif
#ifdef LOCKS_FIRST
        take(lock);
#endif
#ifdef TWO_FLAGS
        asked = true;
#else
        park = ASKED;
#endif
#ifndef PARK_SILENT
        bell_moved = true;
        server_waits_bell = false;
#endif
        do
        :: ANSWERED -> break
        :: !ANSWERED ->
            atomic { forker_waits[me] = !ANSWERED };
            !forker_waits[me]
        od;
#if !defined LOCKS_FIRST && !defined NO_LOCKS
        take(lock);
#endif
        atomic { assert(at_rest && !in_hands && !pushing) };
#ifndef NO_LOCKS
        lock = false;
#endif
#ifdef TWO_FLAGS
        asked = false;
#else
        park = RUN;
#endif
#ifndef RELEASE_SILENT
        wake_all();
#endif
#ifndef NO_FORK_LOCK
        fork_lock = false
#endif
    :: atomic { forks == FORKS -> break }
    od;
    finished++
}

active proctype client() {
    byte pushes;

    do
    :: pushes < PUSHES ->
        pushes++;
        if
        :: atomic { !lock -> lock = true };
            pushing = true;
            pushing = false;
            lock = false
        :: atomic { lock -> skip }
        fi
    :: else -> break
    od;
    finished++
}

inline rest() {
    if
    :: REQUESTED ->
        atomic {
#ifdef TWO_FLAGS
            parked = true;
#else
            park = PARKED;
#endif
            at_rest = true
        }
#ifndef ANSWER_SILENT
        wake_all();
#endif
        do
#ifdef TWO_FLAGS
        :: atomic { !asked -> at_rest = false; break }
        :: asked ->
            atomic { server_waits = asked };
#else
        :: atomic { park != PARKED -> at_rest = false; break }
        :: park == PARKED ->
            atomic { server_waits = (park == PARKED) };
#endif
end_parked:
            !server_waits
        od;
#ifdef TWO_FLAGS
        parked = false
#endif
    :: else -> skip
    fi
}

inline withdraw() {
    in_hands = true;
    in_hands = false;
#ifdef PARKED_WITH_LOCK
    rest();
#endif
    lock = false
}

active proctype server() {
end:
    do
    :: true ->
#ifndef PARKED_WITH_LOCK
        rest();
#endif
        if
        :: atomic { !lock -> lock = true };
            withdraw()
#ifndef LOCKS_FIRST
        :: atomic { lock -> skip }
#endif
        fi;
        bell_moved = false;
        if
#ifndef PARK_OVERLOOKED
        :: REQUESTED -> skip
        :: !REQUESTED ->
#else
        :: true ->
#endif
            server_waits_bell = !bell_moved;
end_asleep:
            !server_waits_bell
        fi
    od
}

init {
    atomic {
        run forker(0);
        run forker(1)
    }
}

active proctype quiet() {
    timeout;
    assert(finished == THREADS);
    assert(!at_rest && !lock)
}
