/*
 * The ring from client to server: words, records of one to three of them, head and tail that count words for ever and
 * are masked when used. Two threads share an endpoint under its try-lock; what does not fit goes to the overflow list
 * (whose own model is overflow.pml; here it has arrived with that).
 *
 * Memory: weaker than x86 and as weak as C11 for what is claimed. A word that is stored waits in the producer's store
 * buffer and becomes visible at any later time, in any order among words; the tail becomes visible when all words
 * stored before it are: that is what release means. The consumer's loads come in program order after the load of the
 * tail (acquire) and before the store of the head (release); mutations take each of the three away.
 * The head that a producer knows is an old one, looked up anew only when the ring seems full.
 *
 * Abstracted: 4 words, 4 records in all; a word's value tells record, length and place.
 *
 * @claim whole safety: no record is lost, doubled, torn or out of order, and no unread word is overwritten
 * @claim finished ltl: all records arrive (weak fairness)
 * @mutation TAIL_RELAXED whole assertion: the tail may be visible before the words
 * @mutation TAIL_UNORDERED_LOAD whole assertion: the consumer loads a word before the tail (no acquire)
 * @mutation HEAD_BEFORE_READ whole assertion: the consumer publishes the head before it has read the words
 * @mutation TAIL_EACH_WORD whole assertion: the tail is published after each word, not after each record
 * @mutation ONE_WORD_TOO_MANY whole assertion: the test for a full ring is off by one
 * @mutation NO_LOCK whole assertion: two threads push at one endpoint without its lock
 * @mutation DROPPED_WHEN_FULL whole assertion: a record that does not fit is not put on the overflow list
 */
#define WORDS 4
#define RECORDS 4
#define LONGEST 3

#define WORD(record, length, place) ((record) * 16 + (length) * 4 + (place))

/* Memory as all see it. */
byte word[WORDS];
byte tail, head;

/* The store buffer of the thread that holds the endpoint: dropping the lock (release) waits until it is empty. */
bool word_held[WORDS], tail_held;
byte word_value[WORDS], tail_value;

#define WORDS_VISIBLE (!word_held[0] && !word_held[1] && !word_held[2] && !word_held[3])
#ifdef TAIL_RELAXED
#define TAIL_MAY_GO true
#else
#define TAIL_MAY_GO WORDS_VISIBLE
#endif

/* The endpoint: what belongs to the holder of its lock. */
bool lock;
byte own_tail, known_head;

/* What only the claims look at. */
chan pushed = [RECORDS] of { byte };
byte started, arrived, read_to;
byte got;

ltl finished { <> (arrived == RECORDS) }

inline arrive(record) {
    assert((got & (1 << (record))) == 0);
    got = got | (1 << (record));
    arrived++
}

inline store_word(at, value) {
    atomic {
        !word_held[(at) % WORDS] -> word_held[(at) % WORDS] = true;
        word_value[(at) % WORDS] = value;
        assert((at) < read_to + WORDS)
    }
}

#ifdef ONE_WORD_TOO_MANY
#define ROOM (WORDS + 1)
#else
#define ROOM WORDS
#endif

proctype producer() {
    byte record, length, place;

    do
    :: atomic {
           started < RECORDS -> record = started;
           started++;
           select(length : 1 .. LONGEST)
       }
#ifdef NO_LOCK
        if
        :: true ->
#else
        /* A try-lock: who does not get it goes to another endpoint, here to the overflow list. */
        if
        :: atomic { lock -> arrive(record) }
        :: atomic { !lock -> lock = true }
#endif
            atomic {
                if
                :: own_tail + length > known_head + ROOM -> known_head = head
                :: else -> skip
                fi
            }
            if
            :: own_tail + length > known_head + ROOM ->
#ifndef DROPPED_WHEN_FULL
                d_step { arrive(record) }
#else
                skip
#endif
            :: else ->
#ifdef TAIL_EACH_WORD
                pushed!record;
#endif
                do
                :: place < length ->
                    store_word(own_tail + place, WORD(record, length, place));
#ifdef TAIL_EACH_WORD
                    atomic {
                        !tail_held -> tail_held = true;
                        tail_value = own_tail + place + 1
                    }
#endif
                    place++
                :: atomic { place == length -> place = 0; break }
                od;
                atomic {
#ifndef TAIL_EACH_WORD
                    pushed!record;
#endif
                    own_tail = own_tail + length;
                    !tail_held -> tail_held = true;
                    tail_value = own_tail
                }
            fi;
            atomic {
                WORDS_VISIBLE && !tail_held -> lock = false;
                record = 0;
                length = 0
            }
        fi
    :: atomic { started == RECORDS -> break }
    od
}

active proctype memory() {
end:
    do
    :: atomic { word_held[0] -> word[0] = word_value[0]; word_held[0] = false; word_value[0] = 0 }
    :: atomic { word_held[1] -> word[1] = word_value[1]; word_held[1] = false; word_value[1] = 0 }
    :: atomic { word_held[2] -> word[2] = word_value[2]; word_held[2] = false; word_value[2] = 0 }
    :: atomic { word_held[3] -> word[3] = word_value[3]; word_held[3] = false; word_value[3] = 0 }
    :: atomic {
           tail_held && TAIL_MAY_GO -> tail = tail_value;
           tail_held = false;
           tail_value = 0
       }
    od
}

active proctype consumer() {
    byte own_head, known_tail, length, place, value, record;
#ifdef TAIL_UNORDERED_LOAD
    byte early;
    bool loaded;
#endif

end:
    do
#ifdef TAIL_UNORDERED_LOAD
    :: atomic {
           !loaded -> loaded = true;
           early = word[own_head % WORDS]
       }
    :: loaded && tail != own_head ->
#else
    :: tail != own_head ->
#endif
        known_tail = tail;
        do
        :: own_head == known_tail -> break
        :: else ->
            value = word[own_head % WORDS];
#ifdef TAIL_UNORDERED_LOAD
            if
            :: loaded -> value = early; loaded = false
            :: else -> skip
            fi;
#endif
#ifdef HEAD_BEFORE_READ
            head = own_head + (value / 4) % 4;
#endif
            d_step {
                record = value / 16;
                length = (value / 4) % 4;
                assert(length > 0 && value % 4 == 0);
                assert(own_head + length <= known_tail);
                place = 1
            }
            do
            :: atomic {
                   place < length -> value = word[(own_head + place) % WORDS];
                   assert(value == WORD(record, length, place));
                   place++
               }
            :: atomic { place == length -> break }
            od;
            atomic {
                own_head = own_head + length;
                read_to = own_head;
                pushed?place;
                assert(place == record);
                arrive(record)
            }
            /* The head is published for each record or for several. */
            if
            :: head = own_head
            :: own_head != known_tail -> skip
            fi;
            d_step {
                place = 0;
                value = 0;
                length = 0;
                record = 0
            }
        od
    od
}

init {
    atomic {
        run producer();
        run producer()
    }
}

active proctype quiet() {
    timeout;
    assert(arrived == RECORDS);
    assert(head == tail && tail == own_tail)
}
