/*
 * A server that stops serving, for want of a processor or at its end, and serves again: clients then work on the heap
 * themselves, and nothing that was sent or prepared is left where no thread looks.
 *
 *   client                                    server, to stop
 *     serves? else work on the heap             serves = false
 *     enter an endpoint                         for each endpoint:
 *     serves? else leave, and work                enter; serve its records; return its blocks; leave
 *     push a record; leave
 *
 * Abstracted: a ring, and the queue of an endpoint, are the numbers of what they hold (ring.pml, prefill.pml). All
 * words are sequentially consistent, as is SPIN; entering is one exchange. The server waits for a client that has
 * entered: in fact not for ever, as a client that is stopped there has a second to leave.
 *
 * @claim empty safety: once the server has stopped, no endpoint holds a record or a block, then or later
 * @claim finished ltl: every client comes to its end (weak fairness)
 * @mutation SEEN_OUTSIDE empty assertion: a client reads `serves` only before it enters
 * @mutation DRAIN_FIRST empty assertion: the server drains the endpoints before it says that it stops
 * @mutation NOT_ENTERED empty assertion: it drains them without entering
 * @mutation QUEUES_KEPT empty assertion: it returns no prepared blocks
 */
#define CLIENTS 2
#define OPERATIONS 4
#define TURNS 2

bool serves;
bool entered[CLIENTS];
byte records[CLIENTS], prepared[CLIENTS];
bool stopped = true;

byte operations, finished;

ltl finished { <> (finished == CLIENTS) }

proctype client(byte me) {
    bool seen;

    do
    :: atomic { operations < OPERATIONS -> operations++ }
        seen = serves;
        if
        :: seen ->
            atomic { !entered[me] -> entered[me] = true };
#ifndef SEEN_OUTSIDE
            seen = serves;
#endif
            if
            :: seen && prepared[me] > 0 -> prepared[me]--
            :: seen ->
                assert(!stopped);
                records[me]++
            :: else -> skip
            fi;
            entered[me] = false
        :: else -> skip /* it works on the heap */
        fi
    :: atomic { operations == OPERATIONS -> break }
    od;
    finished++
}

inline drain(i) {
#ifndef NOT_ENTERED
    atomic { !entered[i] -> entered[i] = true };
#endif
    records[i] = 0;
#ifndef QUEUES_KEPT
    prepared[i] = 0;
#endif
#ifndef NOT_ENTERED
    entered[i] = false
#else
    skip
#endif
}

active proctype server() {
    byte turns;

    do
    :: turns < TURNS ->
        turns++;
        stopped = false;
        serves = true;
        do
        :: atomic { records[0] = 0; records[1] = 0 }
        :: atomic { prepared[0] == 0 -> prepared[0] = 1 }
        :: break
        od;
#ifdef DRAIN_FIRST
        drain(0);
        drain(1);
        serves = false;
#else
        serves = false;
        drain(0);
        drain(1);
#endif
        stopped = true;
        assert(records[0] + records[1] + prepared[0] + prepared[1] == 0)
    :: turns == TURNS -> break
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
    assert(records[0] + records[1] + prepared[0] + prepared[1] == 0)
}
