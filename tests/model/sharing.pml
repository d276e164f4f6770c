/*
 * Lending: a server without a processor to itself leaves the heap to the clients, and takes it back later.
 *
 *   client                                    server, to lend              server, to take back
 *     enter an endpoint                         enter all endpoints          phase = RUNNING
 *     phase RUNNING? push a record; leave       serve all that is there      wait until nobody is counted
 *     phase LENT? leave:                        phase = LENT                 the heap is the server's
 *       count itself                            leave all endpoints
 *       phase LENT? be at the heap
 *       count itself no more
 *
 * While it is shared, who is at the heap holds its locks, against the others who are; here that is left out: several
 * clients may be there at once, the server never with them.
 *
 * Abstracted: a ring is the number of its records (ring.pml). The count and the phase are sequentially consistent, as
 * is SPIN; entering is one exchange. The server's tidying of a shared heap, under the heap's locks, is left out.
 *
 * @claim alone safety: the server and a client are never at the heap together; what was sent while the heap was the
 *   server's is served before anybody else is there; asleep, nothing is left in a ring
 * @claim finished ltl: every client comes to its end (weak fairness)
 * @mutation LEND_BY_PHASE alone assertion: the server lends without entering the endpoints
 * @mutation DRAIN_EARLY alone assertion: it serves what is there before it enters them
 * @mutation PHASE_OUTSIDE alone assertion: a client looks at the phase before it enters
 * @mutation COUNT_LATE alone assertion: a client looks at the phase before it counts itself
 * @mutation NO_WAIT alone assertion: the server does not wait for those who are counted
 * @mutation WAIT_FIRST alone assertion: it waits for them before it says that it takes the heap back
 */
#define CLIENTS 2
#define OPERATIONS 4
#define TURNS 2

mtype = { RUNNING, LENT };

mtype phase = RUNNING;
bool entered[CLIENTS];
byte records[CLIENTS];
byte counted;
byte at_heap;
bool owned = true;

byte operations, finished;

ltl finished { <> (finished == CLIENTS) }

proctype client(byte me) {
    mtype seen;

    do
    :: atomic { operations < OPERATIONS -> operations++ }
#ifdef PHASE_OUTSIDE
        seen = phase;
#endif
        atomic { !entered[me] -> entered[me] = true };
#ifndef PHASE_OUTSIDE
        seen = phase;
#endif
        if
        :: seen == RUNNING ->
            records[me]++;
            entered[me] = false
        :: else ->
            entered[me] = false;
#ifdef COUNT_LATE
            seen = phase;
            counted++;
#else
            counted++;
            seen = phase;
#endif
            if
            :: seen == LENT ->
                at_heap++;
                assert(!owned);
                assert(records[0] + records[1] == 0 || phase == RUNNING);
                at_heap--
            :: else -> skip /* it asks the server again: as good as an end */
            fi;
            counted--
        fi
    :: atomic { operations == OPERATIONS -> break }
    od;
    finished++
}

inline serve() {
    atomic { assert(at_heap == 0); records[0] = 0 };
    atomic { assert(at_heap == 0); records[1] = 0 }
}

active proctype server() {
    byte turns;

    do
    :: turns < TURNS ->
        turns++;
        serve();
#ifdef DRAIN_EARLY
        serve();
#endif
#ifndef LEND_BY_PHASE
        atomic { !entered[0] -> entered[0] = true };
        atomic { !entered[1] -> entered[1] = true };
#endif
#ifndef DRAIN_EARLY
        serve();
#endif
        owned = false;
        phase = LENT;
#ifndef LEND_BY_PHASE
        entered[1] = false;
        entered[0] = false;
#endif
        /* For a while. */
#ifdef WAIT_FIRST
        counted == 0;
        phase = RUNNING;
#else
        phase = RUNNING;
#ifndef NO_WAIT
        counted == 0;
#endif
#endif
        owned = true
    :: turns == TURNS ->
        serve();
        if
        :: finished == CLIENTS && records[0] + records[1] == 0 -> break
        :: else -> skip
        fi
    od
}

init {
    atomic {
        run client(0);
        run client(1)
    }
}

active proctype quiet() {
    timeout;
    assert(finished == CLIENTS);
    assert(records[0] + records[1] == 0)
}
