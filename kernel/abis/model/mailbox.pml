/*
 * A flush that one core must do, and the core is lazy or runs another address space: no interrupt is sent, but the
 * request waits in the core's mailbox. Two senders, each with a page; one core, two address spaces.
 *
 *   sender                            core, before it uses an address space      core, in the interrupt
 *     clear the page-table entry        lazy = false; or running = SWITCHING       drain
 *     post; fence                       fence                                      answer
 *     running it, or switching,         drain
 *     and not lazy?                     load the address space; running = it
 *       interrupt; wait
 *     the page is free
 *
 * To drain is to take all that is in the mailbox, and to flush it, whatever address space it is of: another's
 * translations are still there when it runs again. A mailbox that was full is a flush of all address spaces.
 *
 * Memory: x86-TSO with store buffers of one entry, for the sender's post and for the core's `lazy` and `running`, which
 * become visible at any later time, also after the loads that follow; fences wait until the buffer is empty. The
 * mailbox's lock is as good as one step.
 *
 * Abstracted: room for one request; how the page-table entry is changed and who is chosen (decision.pml). While a
 * core changes address spaces its interrupts are off. It may fill its TLB at any time, and while it is lazy too.
 *
 * @claim flushed safety: no core uses a translation to a page that was freed
 * @mutation NO_SENDER_FENCE flushed assertion: the sender may look before its post is visible
 * @mutation LOOK_FIRST flushed assertion: it looks before it posts
 * @mutation NO_CORE_FENCE flushed assertion: the core may drain before it is visible that it is lazy no more
 * @mutation DRAIN_FIRST flushed assertion: it drains before it says so
 * @mutation WAKE_OVERLOOKED flushed assertion: it does not drain when it is lazy no more
 * @mutation SWITCH_OVERLOOKED flushed assertion: nor when it changes address spaces
 * @mutation SWITCHING_OVERLOOKED flushed assertion: who is between two address spaces gets no interrupt
 * @mutation LAZY_EARLY flushed assertion: a core says that it is lazy, and then uses the address space once more
 * @mutation OTHERS_DROPPED flushed assertion: what is for another address space than the loaded one is not flushed
 * @mutation OVERFLOW_DROPPED flushed assertion: what did not fit is forgotten
 * @mutation OVERFLOW_LOADED flushed assertion: after that, only the loaded address space is flushed
 * @mutation ANSWER_ONLY flushed assertion: the core answers the interrupt and does not drain
 */
#define SENDERS 2
#define BIT(page) (1 << (page))
#define SWITCHING 2

/* What belongs to the core: the address space it has loaded, whether it uses it, the pages in its TLB. */
bool loaded;
byte cached;

/* What it shows: memory as all see it. */
byte running;
bool lazy;
byte posted;
bool overflow;
bool interrupted[SENDERS];

/* Store buffers. */
mtype = { RUNNING, LAZY };
mtype core_held;
byte core_value;
bool sender_held[SENDERS];

/* Whose pages they are; whether they are mapped. */
bool space[SENDERS];
bool present[SENDERS];

/* What only the claims look at. */
byte stale;

#define PAGES_OF(which) ((space[0] == which) * BIT(0) | (space[1] == which) * BIT(1))

active [SENDERS] proctype sender_buffer() {
end:
    do
    :: atomic {
           sender_held[_pid] -> sender_held[_pid] = false;
           if
           :: posted == 0 -> posted = BIT(_pid)
           :: else -> overflow = true
           fi
       }
    od
}

active proctype core_buffer() {
end:
    do
    :: atomic { core_held == RUNNING -> running = core_value; core_held = 0; core_value = 0 }
    :: atomic { core_held == LAZY -> lazy = core_value; core_held = 0; core_value = 0 }
    od
}

inline look() {
#ifdef SWITCHING_OVERLOOKED
    target = (running == space[me]);
#else
    target = (running == space[me] || running == SWITCHING);
#endif
    target = target && !lazy
}

proctype sender(bool me) {
    bool target;

    do
    :: present[me] = true;
        present[me] = false;
#ifdef LOOK_FIRST
        look();
#endif
        sender_held[me] = true;
#ifndef NO_SENDER_FENCE
        !sender_held[me];
#endif
#ifndef LOOK_FIRST
        look();
#endif
        if
        :: target ->
            atomic { !sender_held[me] -> interrupted[me] = true };
            !interrupted[me]
        :: else -> skip
        fi;
        atomic { !sender_held[me] -> stale = stale | cached & BIT(me); target = false }
    od
}

inline flush(pages) {
    d_step {
        cached = cached & ~(pages);
        stale = stale & ~(pages)
    }
}

inline drain() {
    if
    :: posted == 0 && !overflow -> skip
    :: else ->
        atomic {
            taken = posted;
            if
            :: overflow ->
#ifdef OVERFLOW_LOADED
                taken = taken | PAGES_OF(loaded)
#elif !defined OVERFLOW_DROPPED
                taken = BIT(0) | BIT(1)
#endif
            :: else -> skip
            fi;
#ifdef OTHERS_DROPPED
            taken = taken & PAGES_OF(loaded);
#endif
            posted = 0;
            overflow = false
        };
        atomic { flush(taken); taken = 0 }
    fi
}

inline publish(what, value) {
    atomic {
        core_held == 0 -> core_held = what;
        core_value = value
    }
}

inline fence() {
#ifndef NO_CORE_FENCE
    core_held == 0
#else
    skip
#endif
}

/* For those that have interrupted the core before it drained. */
inline answer() {
    atomic {
        interrupted[0] = interrupted[0] && (asked & BIT(0)) == 0;
        interrupted[1] = interrupted[1] && (asked & BIT(1)) == 0;
        asked = 0
    }
}

inline use() {
    assert((stale & PAGES_OF(loaded)) == 0)
}

active proctype core() {
    byte taken, asked;
    bool idle;

    do
    :: !idle -> use()
    :: atomic {
           interrupted[0] || interrupted[1] -> asked = interrupted[0] * BIT(0) + interrupted[1] * BIT(1)
       };
#ifndef ANSWER_ONLY
        drain();
#endif
        answer()
    :: atomic { !idle -> idle = true };
        publish(LAZY, true);
#ifdef LAZY_EARLY
        use()
#endif
    /* The address space that it is lazy in is used again. */
    :: idle ->
#ifdef DRAIN_FIRST
        drain();
#endif
        publish(LAZY, false);
        fence();
#if !defined DRAIN_FIRST && !defined WAKE_OVERLOOKED
        drain();
#endif
        idle = false
    /* The other address space is used, or lazily kept. */
    :: atomic { true ->
           if
           :: idle -> publish(LAZY, false)
           :: else -> skip
           fi
       };
#ifdef DRAIN_FIRST
        drain();
#endif
        publish(RUNNING, SWITCHING);
        fence();
#if !defined DRAIN_FIRST && !defined SWITCH_OVERLOOKED
        drain();
#endif
        loaded = !loaded;
        publish(RUNNING, loaded);
        idle = false
    od
}

active proctype hardware() {
    do
    :: d_step { present[0] && loaded == space[0] -> cached = cached | BIT(0) }
    :: d_step { present[1] && loaded == space[1] -> cached = cached | BIT(1) }
    od
}

init {
    atomic {
        if
        :: space[1] = 0
        :: space[1] = 1
        fi;
        run sender(0);
        run sender(1)
    }
}
