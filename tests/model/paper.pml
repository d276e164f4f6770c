/*
 * The mailbox of NextGen-Malloc's pseudo code 1, mended as test_sync=on has it: one mailbox for the process, a
 * synchronous message for every malloc and every free. As printed it has two bugs, both of which are mutations here:
 * malloc_done is set and never cleared, so that the second call returns at once with the first one's block; and two
 * threads may both find malloc_ready clear, and then share one answer.
 *
 * The mend: a client holds a lock from before it looks at `ready` until it has read the answer, and clears `done`
 * before it sets `ready`.
 *
 * Abstracted: sizes (a call asks for a block), the heap (a set of blocks), and how the lock waits. The memory is
 * sequentially consistent: pseudo code 1 has plain atomic_load and atomic_store, which are seq_cst in C11.
 *
 * @claim owned safety: each block belongs to one client or to the heap, and all are in the heap when all is quiet
 * @claim finished ltl: every call returns (weak fairness)
 * @mutation DONE_KEPT owned assertion: the paper's first bug: malloc_done is never cleared
 * @mutation NO_LOCK owned assertion: the paper's second bug: two clients find malloc_ready clear
 * @mutation LOCK_ENDS_EARLY owned assertion: the lock is dropped once the request is in, before the answer is read
 * @mutation DONE_CLEARED_LATE finished cycle: done is cleared after ready is set: the answer may be wiped out
 */
#define CLIENTS 2
#define ROUNDS 2
#define BLOCKS 2

#define HEAP 0
#define SERVER 1
#define OWNER(client) (2 + (client))

mtype = { MALLOC, FREE };

bool ready, done, lock;
mtype request;
byte argument, answer;

byte owner[BLOCKS];
byte finished;

ltl finished { <> (finished == CLIENTS) }

#ifdef NO_LOCK
#define take_lock() skip
#define drop_lock() skip
#else
#define take_lock() atomic { !lock -> lock = true }
#define drop_lock() lock = false
#endif

inline send(what, with) {
    take_lock();
    !ready;
    request = what;
    argument = with;
#if !defined DONE_KEPT && !defined DONE_CLEARED_LATE
    done = false;
#endif
    ready = true;
#ifdef DONE_CLEARED_LATE
    done = false;
#endif
#ifdef LOCK_ENDS_EARLY
    drop_lock();
#endif
    done
}

active [CLIENTS] proctype client() {
    byte round, block;

    do
    :: round < ROUNDS ->
        round++;
        send(MALLOC, 0);
        atomic {
            block = answer;
            assert(owner[block] == SERVER);
            owner[block] = OWNER(_pid)
        }
#ifndef LOCK_ENDS_EARLY
        drop_lock();
#endif
        atomic {
            assert(owner[block] == OWNER(_pid));
            owner[block] = SERVER
        }
        send(FREE, block);
#ifndef LOCK_ENDS_EARLY
        drop_lock()
#endif
    :: else -> break
    od;
    finished++
}

active proctype server() {
    byte block;

end:
    do
    :: ready ->
        if
        :: request == MALLOC ->
            atomic {
                if
                :: owner[0] == HEAP -> block = 0
                :: owner[1] == HEAP -> block = 1
                fi;
                owner[block] = SERVER
            }
            answer = block
        :: request == FREE ->
            atomic {
                assert(owner[argument] == SERVER);
                owner[argument] = HEAP
            }
        fi;
        done = true;
        ready = false
    od
}

active proctype quiet() {
    timeout;
    assert(finished == CLIENTS);
    assert(owner[0] == HEAP && owner[1] == HEAP)
}
