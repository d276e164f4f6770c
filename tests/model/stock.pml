/*
 * The stock of one size class at one endpoint: a queue of full magazines from server to client. Two threads share the
 * endpoint, so whoever pops holds its client lock (try-lock); the server, which pushes without it, takes the same lock
 * to withdraw what nobody wants. It never waits for that lock: a thread that holds it may be stopped for long.
 *
 * Memory as in ring.pml: the server's store of an entry becomes visible at any later time, its store of the tail once
 * the entries before it are visible (release). The head that the server knows when it pushes is an old one.
 *
 * Abstracted: two entries; three magazines, which a client gives back to the server at once.
 *
 * @claim owned safety: each magazine is in one place, comes out in order, and none is lost
 * @claim finished ltl: no one waits for ever for the lock (weak fairness)
 * @mutation TAIL_RELAXED owned assertion: the tail may be visible before the entry
 * @mutation POP_UNLOCKED owned assertion: clients pop without the lock
 * @mutation WITHDRAW_UNLOCKED owned assertion: the server withdraws without the lock
 * @mutation HEAD_BEFORE_READ owned assertion: the head is published before the entry is read
 * @mutation ONE_TOO_MANY owned assertion: the test for a full queue is off by one
 */
#define CLIENTS 2
#define POPS 3
#define WITHDRAWALS 1
#define ENTRIES 2
#define MAGAZINES 3

mtype = { SERVER, STOCK, CLIENT };

/* Memory as all see it, and the server's store buffer. */
byte entry[ENTRIES];
byte tail, head;
bool entry_held[ENTRIES], tail_held;
byte entry_value[ENTRIES], tail_value;

bool lock;

mtype owner[MAGAZINES];
chan pushed = [MAGAZINES] of { byte };
byte pops, finished, popped;

ltl finished { <> (finished == CLIENTS) }

#ifdef ONE_TOO_MANY
#define ROOM (ENTRIES + 1)
#else
#define ROOM ENTRIES
#endif

#define ENTRIES_VISIBLE (!entry_held[0] && !entry_held[1])
#ifdef TAIL_RELAXED
#define TAIL_MAY_GO true
#else
#define TAIL_MAY_GO ENTRIES_VISIBLE
#endif

/* With the lock held: the oldest magazine. */
inline pop(magazine, at, to) {
    at = head;
    if
    :: tail != at ->
#ifdef HEAD_BEFORE_READ
        head = at + 1;
#endif
        magazine = entry[at % ENTRIES];
        atomic {
            assert(owner[magazine] == STOCK);
            owner[magazine] = to;
            popped++;
            pushed?<at>;
            assert(at == magazine);
            pushed?at;
            at = 0
        }
#ifndef HEAD_BEFORE_READ
        head = head + 1
#endif
    :: else -> magazine = MAGAZINES
    fi
}

proctype client() {
    byte at, magazine;

    do
    :: atomic { pops < POPS -> pops++ }
        /* The lock is held: the client would go elsewhere. Here it tries again later. */
#ifndef POP_UNLOCKED
        atomic { !lock -> lock = true }
#endif
        pop(magazine, at, CLIENT);
        atomic {
            if
            :: magazine < MAGAZINES -> owner[magazine] = SERVER
            :: else -> skip
            fi;
            magazine = 0
        }
#ifndef POP_UNLOCKED
        lock = false
#endif
    :: atomic { pops == POPS -> break }
    od;
    finished++
}

active proctype server() {
    byte known_head, own_tail, withdrawn, at, magazine;

end:
    do
    :: owner[0] == SERVER || owner[1] == SERVER || owner[2] == SERVER ->
        atomic {
            if
            :: own_tail >= known_head + ROOM -> known_head = head
            :: else -> skip
            fi
        }
        if
        :: own_tail < known_head + ROOM ->
            atomic {
                !entry_held[own_tail % ENTRIES];
                if
                :: owner[0] == SERVER -> magazine = 0
                :: owner[1] == SERVER -> magazine = 1
                :: owner[2] == SERVER -> magazine = 2
                fi;
                owner[magazine] = STOCK;
                pushed!magazine;
                entry_held[own_tail % ENTRIES] = true;
                entry_value[own_tail % ENTRIES] = magazine;
                magazine = 0
            }
            atomic {
                !tail_held -> own_tail++;
                tail_held = true;
                tail_value = own_tail
            }
        :: else ->
end_full:
            head != known_head
        fi
    :: withdrawn < WITHDRAWALS && tail != head ->
        withdrawn++;
#ifndef WITHDRAW_UNLOCKED
        if
        :: atomic { !lock -> lock = true }
#endif
            pop(magazine, at, SERVER);
            magazine = 0;
#ifndef WITHDRAW_UNLOCKED
            lock = false
        :: atomic { lock -> skip }
        fi
#endif
    od
}

active proctype memory() {
end:
    do
    :: atomic { entry_held[0] -> entry[0] = entry_value[0]; entry_held[0] = false; entry_value[0] = 0 }
    :: atomic { entry_held[1] -> entry[1] = entry_value[1]; entry_held[1] = false; entry_value[1] = 0 }
    :: atomic {
           tail_held && TAIL_MAY_GO -> tail = tail_value;
           tail_held = false;
           tail_value = 0
       }
    od
}

init {
    atomic {
        owner[0] = SERVER;
        owner[1] = SERVER;
        owner[2] = SERVER;
        run client();
        run client()
    }
}

active proctype quiet() {
    timeout;
    assert(finished == CLIENTS);
    assert(tail - head == len(pushed));
    assert(tail == popped + len(pushed))
}
