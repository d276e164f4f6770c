/*
 * The stock of one size class at one endpoint: a queue of full magazines from server to client. Each place has a word
 * that says it is filled, and for the how manieth time: one more than the number of what lies there. That is all that a
 * client looks at, and it may take several at once. Two threads share the endpoint, so whoever takes holds its lock.
 * The server puts without it, and takes the same lock to withdraw: with a try what nobody wants, as a thread that holds
 * the lock may be stopped for long; and waiting for it where all must go back.
 *
 * Memory: the server's store of a magazine becomes visible at any later time, its store of the place's word once the
 * magazine there is visible, which is less than release promises. The server itself sees its own stores at once.
 * Dropping the lock (release) waits until all is visible. When the server puts, the number taken that it has seen is old.
 *
 * Abstracted: two places; three magazines, which a client gives back to the server at once; numbers that do not wrap
 * around. Large blocks go the same way, one at a time.
 *
 * @claim owned safety: each magazine is in one place, comes out in order, none is lost, nor left where all go back
 * @claim finished ltl: no one waits for ever for the lock (weak fairness)
 * @mutation FILLED_RELAXED owned assertion: the place's word may be visible before the magazine
 * @mutation FILLED_UNORDERED_LOAD owned assertion: a client loads the magazine before the place's word (no acquire)
 * @mutation FILLED_FOR_EVER owned assertion: the word tells that the place was filled, not for the how manieth time
 * @mutation LOOK_ONCE owned assertion: of several at once, only the first place is looked at
 * @mutation TAKEN_BEFORE_READ owned assertion: that it was taken is told before the magazine is read
 * @mutation TAKE_UNLOCKED owned assertion: clients take without the lock
 * @mutation WITHDRAW_UNLOCKED owned assertion: the server withdraws without the lock
 * @mutation WITHDRAW_ALL_TRIES owned assertion: where all must go back, the server leaves it where the lock is held
 * @mutation MISS_KEEPS_LOCK owned assertion: a client that finds nothing does not drop the lock
 * @mutation ONE_TOO_MANY owned assertion: the test for a full queue is off by one
 */
#define CLIENTS 2
#define TAKES 3
#define AT_ONCE 2
#define WITHDRAWALS 1
#define PLACES 2
#define MAGAZINES 3

mtype = { SERVER, STOCK, CLIENT };

/* Memory as all see it, and the server's store buffer. */
byte magazine_at[PLACES], filled[PLACES];
bool magazine_held[PLACES], filled_held[PLACES];
byte magazine_value[PLACES], filled_value[PLACES];
/* Of the server alone; of whoever holds the lock, and read by the server. */
byte put, taken;

bool lock;

mtype owner[MAGAZINES];
chan pushed = [MAGAZINES] of { byte };
byte takes, finished;
bool emptied;

ltl finished { <> (finished == CLIENTS && emptied) }

#ifdef ONE_TOO_MANY
#define ROOM (PLACES + 1)
#else
#define ROOM PLACES
#endif

#ifdef FILLED_RELAXED
#define MAY_GO(place) true
#else
#define MAY_GO(place) (!magazine_held[place])
#endif

#ifdef FILLED_FOR_EVER
#define IS_FILLED(number) (filled[(number) % PLACES] != 0)
#else
#define IS_FILLED(number) (filled[(number) % PLACES] == (number) + 1)
#endif

#define ALL_VISIBLE (!magazine_held[0] && !magazine_held[1] && !filled_held[0] && !filled_held[1])
/* As the server reads it. */
#define OWN_AT(place) (magazine_held[place] -> magazine_value[place] : magazine_at[place])

/* Whoever has read a magazine has it: the oldest. */
inline get(magazine, to) {
    assert(magazine < MAGAZINES && owner[magazine] == STOCK);
    owner[magazine] = to;
    assert(pushed?[eval(magazine)]);
    pushed?eval(magazine)
}

proctype client() {
    byte number, got, magazine;

    do
    :: atomic { takes < TAKES -> takes++ }
        /* The lock is held: the client would go elsewhere. Here it tries again later. */
#ifndef TAKE_UNLOCKED
        atomic { !lock -> lock = true; number = taken }
#else
        number = taken;
#endif
        do
        :: got < AT_ONCE ->
#ifdef FILLED_UNORDERED_LOAD
            magazine = magazine_at[number % PLACES];
#endif
            if
#ifdef LOOK_ONCE
            :: IS_FILLED(number) || got > 0 ->
#else
            :: IS_FILLED(number) ->
#endif
#ifdef TAKEN_BEFORE_READ
                taken = number + 1;
#endif
#ifndef FILLED_UNORDERED_LOAD
                magazine = magazine_at[number % PLACES];
#endif
                atomic {
                    get(magazine, CLIENT);
                    /* It is used, freed, and has come back. */
                    owner[magazine] = SERVER;
                    magazine = 0;
                    number++;
                    got++
                }
            :: else -> break
            fi
        :: else -> break
        od;
        if
        :: got > 0 -> taken = number;
#ifndef TAKE_UNLOCKED
            lock = false
#endif
        :: else ->
#ifdef MISS_KEEPS_LOCK
            skip
#else
            lock = false
#endif
        fi;
        atomic { number = 0; got = 0 }
    :: atomic { takes == TAKES -> break }
    od;
    finished++
}

/* With the lock held: one magazine, if there is one. */
inline take_back() {
    if
    :: put != taken ->
        magazine = OWN_AT(taken % PLACES);
        atomic {
            get(magazine, SERVER);
            magazine = 0
        }
        taken++
    :: else -> skip
    fi
}

active proctype server() {
    byte withdrawn, magazine;

end:
    do
    :: put < taken + ROOM && (owner[0] == SERVER || owner[1] == SERVER || owner[2] == SERVER) ->
        atomic {
            !magazine_held[put % PLACES] && !filled_held[put % PLACES];
            if
            :: owner[0] == SERVER -> magazine = 0
            :: owner[1] == SERVER -> magazine = 1
            :: owner[2] == SERVER -> magazine = 2
            fi;
            owner[magazine] = STOCK;
            pushed!magazine;
            magazine_held[put % PLACES] = true;
            magazine_value[put % PLACES] = magazine;
            magazine = 0
        }
        atomic {
            filled_held[put % PLACES] = true;
            filled_value[put % PLACES] = put + 1;
            put++
        }
    :: withdrawn < WITHDRAWALS && put != taken ->
        withdrawn++;
#ifndef WITHDRAW_UNLOCKED
        if
        :: atomic { !lock -> lock = true }
#endif
            take_back();
#ifndef WITHDRAW_UNLOCKED
            atomic { ALL_VISIBLE -> lock = false }
        :: atomic { lock -> skip }
        fi
#endif
    :: !emptied ->
        /* The heap is to be shared: nothing is put meanwhile. */
        do
        :: put != taken ->
#ifdef WITHDRAW_ALL_TRIES
            if
            :: atomic { !lock -> lock = true }
            :: atomic { lock -> break }
            fi;
#else
            atomic { !lock -> lock = true }
#endif
            take_back();
            atomic { ALL_VISIBLE -> lock = false }
        :: else -> break
        od;
        atomic {
            assert(len(pushed) == 0);
            emptied = true
        }
    od
}

#define STORE_MAGAZINE(place)                                         \
    atomic {                                                          \
        magazine_held[place] -> magazine_at[place] = magazine_value[place];\
        magazine_held[place] = false;                                 \
        magazine_value[place] = 0                                     \
    }
#define STORE_FILLED(place)                                           \
    atomic {                                                          \
        filled_held[place] && MAY_GO(place) -> filled[place] = filled_value[place];\
        filled_held[place] = false;                                   \
        filled_value[place] = 0                                       \
    }

active proctype memory() {
end:
    do
    :: STORE_MAGAZINE(0)
    :: STORE_MAGAZINE(1)
    :: STORE_FILLED(0)
    :: STORE_FILLED(1)
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
    assert(emptied);
    assert(put - taken == len(pushed))
}
