/*
 * Fork, and others that work in the server's place: the thread claims the server's lock, for which the server makes way
 * between two passes, and, to fork, enters the endpoints. A client that cannot enter an endpoint works on the heap.
 *
 * Abstracted: one endpoint; a pass puts a block into a queue in two steps, and withdraws one under the endpoint; two
 * threads fork, three times in all. A signal handler that forks within the arena does not take the lock, and its
 * child forgets the endpoints: there is nothing to model. A try to take the lock that fails is a nap, and so is the
 * server's way-making; both are bounded, so fairness is enough to end them.
 *
 * @claim whole safety: at the fork the server is between two passes, and no thread is within an endpoint
 * @claim finished ltl: every fork comes about (weak fairness)
 * @mutation NO_LOCK whole assertion: the forking thread does not take the server's lock
 * @mutation NO_ENDPOINTS whole assertion: it does not enter the endpoints
 * @mutation PASS_UNLOCKED whole assertion: the server puts blocks into queues outside of its lock
 * @mutation NO_WAY finished cycle: the server does not look whether its lock is claimed
 */
#define FORKERS 2
#define FORKS 3
#define PUSHES 2
#define THREADS (FORKERS + 1)

bool lock, entered;
byte claims;
/* A slot is filled, then counted: between the two, a copy of both is wrong. */
byte filled, counted;
bool pushing;

byte forks, finished;

ltl finished { <> (finished == THREADS) }

proctype forker() {
    do
    :: atomic { forks < FORKS -> forks++ }
#ifndef NO_LOCK
        claims++;
        atomic { !lock -> lock = true };
        claims--;
#endif
#ifndef NO_ENDPOINTS
        atomic { !entered -> entered = true };
#endif
        atomic { assert(filled == counted && !pushing) };
#ifndef NO_ENDPOINTS
        entered = false;
#endif
#ifndef NO_LOCK
        lock = false
#else
        skip
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
        :: atomic { !entered -> entered = true };
            pushing = true;
            pushing = false;
            entered = false
        :: atomic { entered -> skip } /* it works on the heap */
        fi
    :: else -> break
    od;
    finished++
}

active proctype server() {
    do
    :: finished == THREADS -> break
#ifdef NO_WAY
    :: finished < THREADS ->
#else
    :: finished < THREADS && claims == 0 ->
#endif
#ifndef PASS_UNLOCKED
        atomic { !lock -> lock = true };
#endif
        if
        :: counted == 0 ->
            filled = 1;
            counted = 1
        :: counted == 1 ->
            if
            :: atomic { !entered -> entered = true };
                filled = 0;
                counted = 0;
                entered = false
            :: atomic { entered -> skip }
            fi
        fi;
#ifndef PASS_UNLOCKED
        lock = false
#else
        skip
#endif
    od
}

init {
    atomic {
        run forker();
        run forker()
    }
}

active proctype quiet() {
    timeout;
    assert(finished == THREADS);
    assert(!lock && !entered && claims == 0)
}
