/*
 * A server that gets no processor: clients abandon their calls, set `late`, and work on the heap themselves, until the
 * server comes round and clears the flag. A server that comes round and then goes to sleep must not leave the flag
 * set: no client would ever ring again.
 *
 * So the second look before sleep looks for `late`, too, and who sets it rings.
 *
 * Abstracted: slots have no SLEEPING flag (call.pml); the fences of the handshake hold (sleep.pml), so the memory is
 * sequentially consistent; the server may be stopped anywhere for any time. A time-out comes at any moment or never.
 *
 * @claim recovered safety: asleep for good, the server leaves no flag, no call, no slot
 * @claim finished ltl: every call comes to its end (weak fairness)
 * @mutation AS_FIRST_WRITTEN recovered assertion: the flag is cleared when the server comes round, and that is all
 * @mutation LATE_OVERLOOKED recovered assertion: the second look leaves out the flag
 * @mutation LATE_SILENT recovered assertion: who sets the flag does not ring
 */
#define CLIENTS 2
#define OPERATIONS 4

mtype = { HOT, ASLEEP };
mtype = { FREE, PENDING, TAKEN, DONE, ABANDONED };

mtype state = HOT;
mtype slot[CLIENTS];
bool record[CLIENTS];
bool late;
bool bell_moved, waits;

byte operations, finished;

ltl finished { <> (finished == CLIENTS) }

inline ring() {
    if
    :: atomic { state == ASLEEP -> state = HOT };
        bell_moved = true;
        waits = false
    :: atomic { state == HOT -> skip }
    fi
}

proctype client(byte me) {
    do
    :: atomic { operations < OPERATIONS -> operations++ }
        if
        :: late -> skip /* it works on the heap itself */
        /* An allocation. The slot is still the server's if an earlier call was abandoned. */
        :: !late && slot[me] == FREE ->
            slot[me] = PENDING;
            record[me] = true;
            ring();
            if
            :: atomic { slot[me] == DONE -> slot[me] = FREE }
            :: atomic { slot[me] == PENDING || slot[me] == TAKEN -> slot[me] = ABANDONED };
                late = true;
#if !defined LATE_SILENT && !defined AS_FIRST_WRITTEN
                ring()
#endif
            fi
        :: !late && slot[me] != FREE -> skip
        fi
    :: atomic { operations == OPERATIONS -> break }
    od;
    finished++
}

inline read(i) {
    if
    :: record[i] ->
        record[i] = false;
        busy = true;
        if
        :: atomic { slot[i] == PENDING -> slot[i] = TAKEN };
            atomic {
                if
                :: slot[i] == TAKEN -> slot[i] = DONE
                :: slot[i] == ABANDONED -> slot[i] = FREE
                fi
            }
        :: atomic { slot[i] == ABANDONED -> slot[i] = FREE }
        fi
    :: else -> skip
    fi
}

active proctype server() {
    bool busy;

    do
    :: true ->
        busy = false;
        late = false;
        read(0);
        read(1);
        if
        :: busy -> skip
        :: else ->
            bell_moved = false;
            state = ASLEEP;
            busy = record[0];
            busy = busy || record[1];
#if !defined LATE_OVERLOOKED && !defined AS_FIRST_WRITTEN
            busy = busy || late;
#endif
            if
            :: busy -> skip
            :: else ->
                waits = !bell_moved;
end_asleep:
                !waits
            fi;
            state = HOT
        fi
    od
}

init {
    atomic {
        slot[0] = FREE;
        slot[1] = FREE;
        run client(0);
        run client(1)
    }
}

active proctype quiet() {
    timeout;
    assert(finished == CLIENTS);
    assert(!late);
    assert(!record[0] && !record[1] && slot[0] == FREE && slot[1] == FREE)
}
