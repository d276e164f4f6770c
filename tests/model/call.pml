/*
 * Calls: the life of a slot, with time-outs at any moment, stale records in the ring, a ring that is full, and slots
 * used again by other clients.
 *
 *   FREE -> CLAIMED          client, compare-and-swap
 *   CLAIMED -> PENDING       client, store with release after the arguments
 *   PENDING -> FREE          client, compare-and-swap: no record could be pushed, so no one else would end the call
 *   + SLEEPING               client, compare-and-swap, before it waits on the word
 *   PENDING -> TAKEN         server, compare-and-swap that keeps SLEEPING and is repeated if only that changed
 *   PENDING, TAKEN -> ABANDONED   client, compare-and-swap, repeated unless the word says DONE
 *   any -> DONE              server, exchange after the answer; wakes if SLEEPING was set
 *   ABANDONED -> FREE        server: at once when it would take the call, after undoing the work when it was DONE
 *   DONE -> FREE             client, after it has read the answer
 *
 * A client whose call was not answered, or that found no slot, takes a block from the heap itself. It gives a block
 * back to the heap before the next call.
 *
 * The word is only ever changed by read-modify-writes and by stores of who owns the slot, so sequential consistency
 * loses nothing about it; arguments and answer are ordered by it (release and acquire), and ARGUMENT_LATE and
 * FREE_EARLY are what happens if they are not. Abstracted: the server does not sleep (sleep.pml), the ring is a channel
 * (ring.pml), the heap, which is under a lock, is one step.
 * A client is patient (never times out) or not, as it likes with each call: what is claimed of patient ones is that
 * they always get their answer. The ring starts with a stale record, as the ring of a child after fork may.
 *
 * @claim owned safety: a block is one client's or the heap's, and handed out once, no slot leaks, a waiting client is woken
 * @claim finished ltl: every call comes to its end (weak fairness)
 * @mutation UNDO_SKIPPED owned assertion: the work of an abandoned call is not undone
 * @mutation SLOT_KEPT owned assertion: the slot of an abandoned call is not freed
 * @mutation SKIPPED_NOT_FREED owned assertion: a call found abandoned when it would be taken is skipped, not freed
 * @mutation ABANDON_BY_STORE owned assertion: abandoning is a store
 * @mutation ABANDON_TO_FREE owned assertion: abandoning frees the slot at once
 * @mutation DONE_BY_STORE owned assertion: done is a load and a store, not an exchange
 * @mutation FLAG_DROPPED owned assertion: taking a call drops the flag of who waits
 * @mutation TAKE_ONCE owned assertion: a compare-and-swap that failed because the client fell asleep is not repeated
 * @mutation TAKE_UNCHECKED owned assertion: a record is believed without a look at the slot
 * @mutation SLEEP_BY_STORE owned assertion: the flag is set by a store
 * @mutation WAIT_UNCHECKED owned assertion: the wait does not compare the word
 * @mutation WAKE_BELIEVED owned assertion: whoever is woken believes that the call is done
 * @mutation WITHDRAW_BY_STORE owned assertion: a call without a record is withdrawn by a store
 * @mutation WITHDRAW_FORGOTTEN owned assertion: a call without a record is waited for
 * @mutation ARGUMENT_LATE owned assertion: the arguments are written after PENDING is visible
 * @mutation FREE_EARLY owned assertion: the slot is freed before the answer is read
 */
#define CLIENTS 2
#define CALLS 3
#define SLOTS 2
#define BLOCKS 3
#define RECORDS 2
#define NO_BLOCK BLOCKS
#define ASKED 1

#define FREE 0
#define CLAIMED 1
#define PENDING 2
#define TAKEN 3
#define DONE 4
#define ABANDONED 5
#define SLEEPING 8

#define HEAP 0
#define SERVER 1
#define OWNER (2 + me)

byte word[SLOTS];
byte argument[SLOTS], answer[SLOTS];
chan ring = [RECORDS] of { byte };

/* Who waits on which slot's word: slot + 1, or 0. */
byte waits[CLIENTS];

byte owner[BLOCKS];
byte calls, finished;

ltl finished { <> (finished == CLIENTS) }

inline give_back(block) {
    d_step {
        assert(owner[block] == OWNER);
        owner[block] = HEAP;
        block = NO_BLOCK
    }
}

inline take_from_heap(to) {
    if
    :: owner[0] == HEAP -> block = 0
    :: owner[0] != HEAP && owner[1] == HEAP -> block = 1
    :: owner[0] != HEAP && owner[1] != HEAP ->
        assert(owner[2] == HEAP);
        block = 2
    fi;
    owner[block] = to
}

inline take_answer() {
#ifdef FREE_EARLY
    word[slot] = FREE;
#endif
    atomic {
        block = answer[slot];
        answer[slot] = 0;
        assert(block < BLOCKS && owner[block] == SERVER);
        owner[block] = OWNER
    }
#ifndef FREE_EARLY
    word[slot] = FREE
#endif
}

inline abandon() {
#ifdef ABANDON_BY_STORE
    word[slot] = ABANDONED;
    break
#else
    atomic {
        if
        :: word[slot] == seen ->
#ifdef ABANDON_TO_FREE
            word[slot] = FREE;
#else
            word[slot] = ABANDONED;
#endif
            break
        :: else -> skip
        fi
    }
#endif
}

proctype client(byte me) {
    byte slot, seen, block;
    bool patient;

    block = NO_BLOCK;
    do
    :: atomic { calls < CALLS -> calls++ }
        if
        :: block != NO_BLOCK -> give_back(block)
        :: else -> skip
        fi;
        if
        :: atomic { word[0] == FREE -> word[0] = CLAIMED; slot = 0 }
        :: atomic { word[1] == FREE -> word[1] = CLAIMED; slot = 1 }
        :: atomic { word[0] != FREE && word[1] != FREE -> goto served }
        fi;
#ifdef ARGUMENT_LATE
        word[slot] = PENDING;
        patient = true;
        argument[slot] = ASKED;
#else
        /* No one looks at the arguments before the word. */
        atomic {
            argument[slot] = ASKED;
            word[slot] = PENDING;
            if
            :: patient = true
            :: patient = false
            fi
        }
#endif
        if
        :: atomic { nfull(ring) -> ring!slot }
#ifdef WITHDRAW_FORGOTTEN
        :: atomic { full(ring) -> skip }
#elif defined WITHDRAW_BY_STORE
        :: atomic { full(ring) -> skip };
            word[slot] = FREE;
            goto served
#else
        :: atomic { full(ring) -> skip };
            atomic {
                if
                :: word[slot] == PENDING -> word[slot] = FREE; goto served
                :: else -> skip
                fi
            }
#endif
        fi;
        do
        :: true ->
            seen = word[slot];
            if
            :: seen == DONE -> take_answer(); break
            :: seen != DONE && !patient -> abandon()
            :: seen != DONE ->
#ifdef SLEEP_BY_STORE
                word[slot] = seen | SLEEPING;
                seen = seen | SLEEPING;
#else
                atomic {
                    if
                    :: word[slot] == seen -> word[slot] = seen | SLEEPING; seen = seen | SLEEPING
                    :: else -> seen = FREE
                    fi
                }
#endif
                /* The kernel compares and falls asleep in one step. */
                atomic {
                    if
#ifdef WAIT_UNCHECKED
                    :: seen != FREE -> waits[me] = slot + 1
#else
                    :: seen != FREE && word[slot] == seen -> waits[me] = slot + 1
#endif
                    :: else -> skip
                    fi
                }
                if
                :: atomic { waits[me] == 0 -> skip };
#ifdef WAKE_BELIEVED
                    take_answer();
                    break
#endif
                :: atomic { waits[me] != 0 && !patient -> waits[me] = 0 }
                fi
            fi
        od;
served:
        atomic {
            if
            :: block == NO_BLOCK -> take_from_heap(OWNER)
            :: else -> skip
            fi;
            seen = 0;
            slot = 0;
            patient = false
        }
    :: atomic { calls == CALLS -> break }
    od;
    if
    :: block != NO_BLOCK -> give_back(block)
    :: else -> skip
    fi;
    finished++
}

inline wake(slot) {
    d_step {
        if
        :: waits[0] == slot + 1 -> waits[0] = 0
        :: else -> skip
        fi;
        if
        :: waits[1] == slot + 1 -> waits[1] = 0
        :: else -> skip
        fi
    }
}

active proctype server() {
    byte slot, seen, block;

end:
    do
    :: atomic { ring?slot -> seen = word[slot] }
        do
#ifdef TAKE_UNCHECKED
        :: true -> word[slot] = TAKEN; break
#else
        :: seen == ABANDONED ->
#ifndef SKIPPED_NOT_FREED
            word[slot] = FREE;
#endif
            goto next
        :: (seen & 7) == PENDING ->
            atomic {
                if
#ifdef FLAG_DROPPED
                :: word[slot] == seen -> word[slot] = TAKEN; break
#else
                :: word[slot] == seen -> word[slot] = TAKEN | (seen & SLEEPING); break
#endif
                :: else -> seen = word[slot];
#ifdef TAKE_ONCE
                    if
                    :: seen != ABANDONED -> goto next
                    :: else -> skip
                    fi
#endif
                fi
            }
        /* A stale record. */
        :: seen != ABANDONED && (seen & 7) != PENDING -> goto next
#endif
        od;
        atomic {
            assert(argument[slot] == ASKED);
            argument[slot] = 0;
            take_from_heap(SERVER)
        }
        answer[slot] = block;
#ifdef DONE_BY_STORE
        seen = word[slot];
        word[slot] = DONE;
#else
        atomic {
            seen = word[slot];
            word[slot] = DONE
        }
#endif
        if
        :: seen == ABANDONED ->
#ifndef UNDO_SKIPPED
            d_step {
                answer[slot] = 0;
                assert(owner[block] == SERVER);
                owner[block] = HEAP
            }
#endif
#ifndef SLOT_KEPT
            word[slot] = FREE
#endif
        :: else ->
            if
            :: seen & SLEEPING -> wake(slot)
            :: else -> skip
            fi
        fi;
next:
        atomic {
            slot = 0;
            seen = 0;
            block = 0
        }
    od
}

init {
    atomic {
        ring!0;
        run client(0);
        run client(1)
    }
}

active proctype quiet() {
    timeout;
    assert(finished == CLIENTS);
    assert(word[0] == FREE && word[1] == FREE);
    assert(owner[0] == HEAP && owner[1] == HEAP && owner[2] == HEAP)
}
