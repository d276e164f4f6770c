/*
 * The overflow list: free blocks linked through themselves, pushed by any client with a compare-and-swap, taken whole
 * by the server with an exchange. Blocks are used again and pushed again, so the head may come back to a block that a
 * slow client has seen there (ABA), which must do no harm.
 *
 * Abstracted: blocks are numbers from 1 on; what the server takes, any client may get at once. The memory is
 * sequentially consistent but for the link of a block, which a client's push writes before the compare-and-swap: with
 * release that order holds, and LINK_LATE is what relaxed would allow.
 *
 * @claim kept safety: no block is lost, listed twice, or in two hands; all come back when all is quiet
 * @claim finished ltl: every push ends (weak fairness: a lost race means that another push won)
 * @mutation PUSH_BY_STORE kept assertion: the head is stored, not compared and swapped
 * @mutation TAKE_BY_STORE kept assertion: the list is taken by a load and a store of NULL
 * @mutation LINK_LATE kept assertion: the link becomes visible after the head (relaxed order)
 * @mutation LINK_ONCE kept assertion: the link is not written again when the compare-and-swap fails
 */
#define CLIENTS 2
#define ROUNDS 3
#define BLOCKS 3
#define NONE 0

byte head = NONE;
byte link[BLOCKS + 1] = NONE;

/* 0: in the heap. 1, 2: held by that client. 3: being pushed, or on the list. */
byte owner[BLOCKS + 1];
#define LISTED 3

byte finished;

ltl finished { <> (finished == CLIENTS) }

inline get(block) {
    atomic {
        if
        :: owner[1] == 0 -> block = 1
        :: owner[2] == 0 -> block = 2
        :: owner[3] == 0 -> block = 3
        fi;
        owner[block] = _pid + 1
    }
}

active [CLIENTS] proctype client() {
    byte round, block, seen;

    do
    :: round < ROUNDS ->
        round++;
        get(block);
        atomic {
            owner[block] = LISTED;
            seen = head
        }
#ifdef PUSH_BY_STORE
        link[block] = seen;
        head = block;
#else
#ifdef LINK_ONCE
        link[block] = seen;
#endif
        do
        :: true ->
#if !defined LINK_ONCE && !defined LINK_LATE
            link[block] = seen;
#endif
            atomic {
                if
                :: head == seen -> head = block; break
                :: else -> seen = head
                fi
            }
        od;
#ifdef LINK_LATE
        link[block] = seen;
#endif
#endif
        seen = NONE;
        block = NONE
    :: else -> break
    od;
    finished++
}

active proctype server() {
    byte list, next;

end:
    do
    :: head != NONE ->
#ifdef TAKE_BY_STORE
        list = head;
        head = NONE;
#else
        atomic {
            list = head;
            head = NONE
        }
#endif
        do
        :: list != NONE ->
            next = link[list];
            atomic {
                assert(owner[list] == LISTED);
                owner[list] = 0;
                /* Its next user writes on it. */
                link[list] = NONE
            }
            list = next
        :: else -> break
        od;
        next = NONE
    od
}

active proctype quiet() {
    timeout;
    assert(finished == CLIENTS);
    assert(owner[1] == 0 && owner[2] == 0 && owner[3] == 0)
}
