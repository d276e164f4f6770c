/*
 * The server's sleep and what wakes it: HOT, NAP (a bounded sleep), ASLEEP, and the bell.
 *
 * Memory: x86-TSO with store buffers of one entry, which is all that the handshake depends on: a client's store of
 * the tail of its ring, and the server's store of its state, become visible at any later time, also after the loads
 * that follow; fences and read-modify-writes wait until the buffer is empty, and so does the kernel when it puts a
 * thread to sleep. In C11 it takes a seq_cst fence on both sides: a seq_cst store of the state is not enough, as it may
 * be reordered with the loads of the tails after it if these are acquire loads.
 *
 *   server                                  client, after a CALL, or with a backlog at the bound
 *     rung = bell                             fence
 *     state = ASLEEP; fence                   seen = state
 *     look at everything again                while seen is not HOT:
 *     nothing? wait while bell == rung          compare-and-swap seen -> HOT; if it was so: bell++, wake
 *     state = HOT
 *
 * Who stops the server rings without a look at the state, and so does a client that is about to wait for its
 * answer (in STALL; the other claims hold without that): the thread that set HOT may have been stopped before it came
 * to the bell.
 *
 * Abstracted: the ring is the number of its unread words, and whether a CALL is among them (ring.pml); an answer is a
 * flag (call.pml). Both clients are patient: they wait for their answers without a time-out.
 *
 * @claim awake safety: asleep for good, the server leaves no call, no backlog at the bound
 * @claim requests safety REQUESTS: nor a request to stop
 * @claim stalled safety STALL: if a client is stopped for ever between its compare-and-swap and the bell, the other's
 *   call, and a request to stop, are answered all the same
 * @claim finished ltl: every call comes to its end (weak fairness)
 * @claim obeyed ltl REQUESTS: so does a request to stop
 * @mutation NO_CLIENT_FENCE awake assertion: the client's load of the state may come before its store of the tail
 * @mutation NO_SERVER_FENCE awake assertion: the server's second look may come before its store of the state
 * @mutation NO_SECOND_LOOK awake assertion: the server does not look again before it sleeps
 * @mutation CALLS_OVERLOOKED awake assertion: the second look sees the backlog's size only, not the call in it
 * @mutation STOP_OVERLOOKED requests assertion: the second look leaves out stopping
 * @mutation RUNG_LATE awake assertion: the bell is read after the second look
 * @mutation BELL_STILL awake assertion: the client wakes without moving the bell
 * @mutation WAKE_MISSING awake assertion: the client moves the bell without waking
 * @mutation NAP_TO_SLEEP awake assertion: a nap that ends becomes sleep without a new look
 * @mutation RING_ONCE stalled assertion: who waits for an answer does not ring again
 * @mutation STOP_BY_STATE stalled assertion: who stops the server rings only if it is not HOT
 */
#define CLIENTS 2
#if defined STALL || defined REQUESTS
#define OPERATIONS 2
#else
#define OPERATIONS 3
#endif
#define WORDS 2
#define BOUND 2

#ifdef REQUESTS
#define THREADS 2
#elif defined STALL
#define THREADS 3
#else
#define THREADS 2
#endif

mtype = { HOT, NAP, ASLEEP };

/* Memory as all see it. */
mtype state = HOT;
byte unread[CLIENTS];
bool call[CLIENTS], answered[CLIENTS];
bool stop, gone;

/* Whether the bell has moved since the server read it, which is all that is ever asked of it; whether the server is in
   in the kernel, waiting for that. */
bool bell_moved, waits;

/* Store buffers: a client's one word (that ends a record), the server's state. */
bool client_held[CLIENTS], client_call[CLIENTS];
bool server_held;
mtype server_state;

/* What only the claims look at. */
byte operations, finished;
bool stalled;

ltl finished { <> (finished == THREADS) }
ltl obeyed { <> (finished == THREADS) }

/* One process for each buffer, so that fairness holds for each. */
active [CLIENTS] proctype client_buffer() {
end:
    do
    :: atomic {
           client_held[_pid] -> client_held[_pid] = false;
           unread[_pid]++;
           call[_pid] = call[_pid] || client_call[_pid];
           client_call[_pid] = false
       }
    od
}

active proctype server_buffer() {
end:
    do
    :: atomic {
           server_held -> server_held = false;
           state = server_state;
           server_state = 0
       }
    od
}

inline wake() {
#ifndef WAKE_MISSING
    waits = false
#else
    skip
#endif
}

inline move_bell() {
#ifndef BELL_STILL
    bell_moved = true
#else
    skip
#endif
}

inline ring_anyway() {
    move_bell();
    wake()
}

/* Leaves in `seen` the state that was found, HOT if this client set it so. */
inline ring() {
    seen = state;
    do
    :: seen == HOT -> break
    :: else ->
        /* A read-modify-write empties the buffer first. */
        atomic {
            !client_held[me];
            if
            :: state == seen -> won = true; seen = HOT; state = HOT
            :: else -> seen = state
            fi
        }
    od;
    if
    :: won ->
        won = false;
#ifdef STALL
        if
        :: atomic { !stalled -> stalled = true };
end_stalled:
            false
        :: true
        fi;
#endif
        ring_anyway()
    :: else -> skip
    fi
}

inline push(is_call) {
    atomic {
        !client_held[me] -> client_held[me] = true;
        client_call[me] = is_call
    }
}

inline fence() {
#ifndef NO_CLIENT_FENCE
    !client_held[me]
#else
    skip
#endif
}

#define FILLED (unread[me] + client_held[me])

proctype client(byte me) {
    mtype seen;
    bool won;

    do
    :: atomic { operations < OPERATIONS -> operations++ }
        if
        :: FILLED == WORDS -> /* it does the work itself */
            fence();
            ring()
#ifndef STALL
        :: FILLED < WORDS ->
            push(false);
            if
            :: FILLED >= BOUND -> fence(); ring()
            :: else -> skip
            fi
#endif
        :: FILLED < WORDS ->
            atomic { answered[me] = false; push(true) }
            fence();
            ring();
#if defined STALL && !defined RING_ONCE
            ring_anyway();
#endif
            answered[me]
        fi;
        seen = 0
    :: atomic { operations == OPERATIONS -> break }
    od;
    finished++
}

/* Another thread stops the server once the clients are done; or none does. */
proctype other() {
    if
    :: true -> skip
    :: true ->
        finished + stalled == THREADS - 1;
        stop = true;
#ifdef STOP_BY_STATE
        if
        :: atomic { state == NAP || state == ASLEEP -> state = HOT };
            ring_anyway()
        :: atomic { state == HOT -> skip }
        fi;
#else
        ring_anyway();
#endif
        gone
    fi;
    finished++
}

/* The records of one ring; the answers to its calls. */
inline read(i) {
    atomic {
        if
        :: unread[i] > 0 ->
            busy = true;
            unread[i] = 0;
            answered[i] = answered[i] || call[i];
            call[i] = false
        :: else -> skip
        fi
    }
}

#ifdef CALLS_OVERLOOKED
#define MUST_WAKE(i) (unread[i] >= BOUND)
#else
#define MUST_WAKE(i) (unread[i] >= BOUND || call[i])
#endif

inline look_again() {
#ifndef NO_SECOND_LOOK
    busy = busy || MUST_WAKE(0);
    busy = busy || MUST_WAKE(1);
#ifndef STOP_OVERLOOKED
    busy = busy || stop;
#endif
#endif
    skip
}

inline store_state(value) {
    atomic {
        !server_held -> server_held = true;
        server_state = value
    }
}

active proctype server() {
    bool busy;
    mtype depth;

    do
    :: true ->
        busy = false;
        read(0);
        read(1);
        if
        :: stop -> break
        :: !stop && busy -> skip
        :: !stop && !busy ->
            if
#ifndef STALL
            :: depth = NAP
#endif
            :: depth = ASLEEP
            fi;
sleep:
#ifndef RUNG_LATE
            bell_moved = false;
#endif
            store_state(depth);
#ifndef NO_SERVER_FENCE
            !server_held;
#endif
            look_again();
#ifdef RUNG_LATE
            bell_moved = false;
#endif
fall:
            if
            :: busy -> skip
            :: else ->
                atomic {
                    !server_held;
                    waits = !bell_moved
                }
end_asleep:
                if
                :: !waits -> skip
                :: atomic { waits && depth == NAP -> waits = false; depth = ASLEEP };
                    if
                    :: true -> skip
#ifdef NAP_TO_SLEEP
                    :: true -> bell_moved = false; store_state(depth); goto fall
#else
                    :: true -> goto sleep
#endif
                    fi
                fi
            fi;
            atomic { store_state(HOT); depth = 0; busy = false }
        fi
    od;
    gone = true
}

init {
    atomic {
        run client(0);
#ifndef REQUESTS
        run client(1);
#endif
#if defined REQUESTS || defined STALL
        run other()
#endif
    }
}

active proctype quiet() {
    timeout;
#ifdef STALL
    assert(finished + stalled == THREADS)
#else
    assert(finished == THREADS);
    assert(gone || unread[0] < BOUND && unread[1] < BOUND && !call[0] && !call[1])
#endif
}
