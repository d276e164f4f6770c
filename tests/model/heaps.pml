/*
 * Several heaps, each with its lock: blocks return to the heap that they belong to, a thread takes blocks from another
 * heap when its own has none, a purge gathers free pages of all heaps, and the process forks.
 *
 *   malloc                                   free of a magazine          purge
 *     lock own; a resident block? take it      for each heap with          lock the purger
 *     unlock; lock the other; take one there     blocks in the magazine:   for each heap: lock; take pages; unlock
 *     unlock; lock own; take one, or grow          lock; put; unlock       ask the kernel, without a heap's lock
 *     it cannot grow? unlock; the same there                               for each heap: lock; put back; unlock
 *                                                                          unlock the purger
 *   fork
 *     lock the purger, then all heaps in ascending order; flag each heap's lock once it is acquired
 *     in a signal handler that interrupted a holder of a cache's or a depot's lock: only try the purger
 *     in a signal handler that interrupted a holder of a heap's lock: only try the purger; for each other heap, wait
 *       until its lock is acquired or has another fork's flag
 *     after the fork, in the parent: clear the flags of all locks, and only then release the first of them
 *     in the child: free the locks that other threads held, and forget the batch if the purger's was one of them
 *
 * A thread holds one heap's lock at most, except for a fork. The heap of a thread may change at any time, since it
 * follows from the CPU, so an operation determines it once.
 *
 * A lock with a flag belongs to a fork that is going to wait for the lock of the interrupted section. This other fork
 * changes no heap, and holds its locks until the fork in the handler is over. So the heap is consistent in the child.
 * Flags disappear before any lock is released. A handler that interrupts a holder of a lock which the other fork has
 * released therefore finds no flag.
 *
 * Two forks at the same time may wait for each other if both are in handlers that interrupted a holder of a heap's lock
 * (HANDLERS_OF_BOTH; docs/known-problems.md). The claims leave this case out. They do not rely on a C library that lets
 * only one thread fork at a time, as glibc does.
 *
 * The batch of a purge has a section for each heap, written under this heap's lock. Blocks on the pages of a batch are
 * marked as in use. A free therefore looks into the section, under the heap's lock, to detect that a block is freed
 * twice. Ranges do not move meanwhile: which of them the kernel refused is noted beside them.
 *
 * Memory: sequentially consistent, since locks order all accesses. A fork copies the memory in one step, because a
 * thread that writes a page after the kernel has copied its entry waits for the end of the fork.
 *
 * Abstracted: a heap has a page of two blocks and a page of one block, which is absent until the heap grows; a magazine
 * has at most two blocks, and a batch two ranges; no limit (a purge takes what is free); no caches and no depots,
 * except for what a fork does in a handler that interrupted a holder of their locks. Forks have a claim of their own,
 * in which the threads that a handler interrupts do nothing else. heap_start.pml has forks while a heap starts.
 *
 * @claim owned safety: a block has one owner, returns to its heap, and is not lost; no block is in use on a page that
 *   is purged; a second free of a block is detected; a heap grows only if it has no resident free block
 * @claim forked safety FORKS: so in the child of a fork, too; it uses all heaps, and loses at most the batch of another
 *   thread
 * @mutation FREE_TO_OWN owned assertion: a thread puts all blocks of a magazine into its own heap
 * @mutation FREE_UNLOCKED owned assertion: it puts them without the heap's lock
 * @mutation OWN_READ_AGAIN owned assertion: a thread reads again which heap is its own, to release the lock
 * @mutation OWN_KEPT owned assertion: a thread locks another heap while it holds its own heap's lock
 * @mutation OTHER_UNLOCKED owned assertion: it takes from another heap without the lock
 * @mutation GROW_UNCHECKED owned assertion: back at its own heap, a thread grows it without looking for blocks again
 * @mutation PURGE_UNLOCKED owned assertion: the purger takes pages without the heap's lock
 * @mutation PURGE_IN_USE owned assertion: it takes a page if any of its blocks is free
 * @mutation PURGE_UNMARKED owned assertion: it does not mark the blocks of these pages as in use
 * @mutation PUT_BACK_UNLOCKED owned assertion: it puts pages back without the heap's lock
 * @mutation PUT_BACK_TO_ONE owned assertion: it puts the pages of all heaps back into one
 * @mutation REFUSED_FORGOTTEN owned assertion: it does not put back what the kernel refused
 * @mutation REFUSED_MOVED owned assertion: a refused range is exchanged with the last one, under the lock of its heap
 * @mutation BATCH_UNREAD owned assertion: a free does not look into the batch
 * @mutation FORK_UNLOCKED forked assertion: a fork does not take the heaps' locks
 * @mutation FORK_BESIDE_PURGE forked assertion: a fork does not take the purger's lock
 * @mutation FORK_HEAPS_FIRST forked assertion: it takes the purger's lock last
 * @mutation FORK_IN_ANY_ORDER forked assertion: forks take the heaps' locks in different orders
 * @mutation FLAG_BEFORE_LOCK forked assertion: a fork flags a lock while it waits for it
 * @mutation FLAGS_KEPT forked assertion: a fork releases each lock with its flag
 * @mutation HANDLER_WAITS_FOR_PURGER forked assertion: in a handler it waits for the purger's lock
 * @mutation HANDLER_WAITS_FOR_FORKS forked assertion: in a handler it waits for flagged locks, too
 * @mutation HANDLER_SKIPS_HELD forked assertion: in a handler it waits for no lock of a heap, flagged or not
 * @mutation HANDLERS_OF_BOTH forked assertion: two forks are in handlers that interrupted holders of heaps' locks
 * @mutation LOCK_NOT_FREED forked assertion: the child does not free a heap's lock that another fork held
 * @mutation BATCH_NOT_LOST forked assertion: the child frees the purger's lock, and keeps the parent's batch
 * @mutation PURGER_NOT_FREED forked assertion: the child does not free the purger's lock
 */
#define HEAPS 2
#define HEAP_PAGES 2
#define HEAP_BLOCKS 3
#define PAGES (HEAPS * HEAP_PAGES)
#define BLOCKS (HEAPS * HEAP_BLOCKS)
#define RANGES 2
#define NONE 15

#ifdef FORKS
#define THREADS 0
#define PURGES 1
#define FORKERS 2
#else
#define THREADS 2
#define OPERATIONS 3
#define PURGES 1
#define FORKERS 0
#endif

/* A heap's blocks and pages; a page's blocks; a block's page. */
#define BLOCK(h, i) ((h) * HEAP_BLOCKS + (i))
#define PAGE(h, i) ((h) * HEAP_PAGES + (i))
#define FIRST(page) ((page) / 2 * HEAP_BLOCKS + (page) % 2 * 2)
#define LAST(page) (FIRST(page) + 1 - (page) % 2)
#define PAGE_OF(block) ((block) / HEAP_BLOCKS * 2 + (block) % HEAP_BLOCKS / 2)

mtype = { ABSENT, DIRTY, TAKEN, CLEAN };

bool lock[HEAPS], purger_lock;
/* In the word of the lock, which a release clears. */
bool flag[HEAPS];
/* Under each heap's lock: its pages, its bits, its section of the batch. */
mtype page[PAGES];
bool used[BLOCKS];
byte section[HEAPS], section_end[HEAPS];
bool claims[HEAPS];
/* Under the purger's lock; a range also under its heap's lock once its section is written. */
byte range[RANGES], count;
bool refused[RANGES];

/* Whether this is the child of a fork, and whether it lacks the parent's batch. */
bool child, batch_is_lost;

/* What only the claims look at: who has a block, and whether a thread is at work in a heap. */
#define HEAP 0
#define PROGRAM 1
#define MAGAZINE(me) (2 + (me))
byte owner[BLOCKS];
bool at_work[HEAPS];
byte operations, finished;

inline enter(h) {
    atomic {
        !lock[h] -> lock[h] = true;
        assert(!at_work[h]);
        at_work[h] = true
    }
}

inline enter_unlocked(h) {
    atomic {
        assert(!at_work[h]);
        at_work[h] = true
    }
}

inline leave(h) {
    atomic {
        assert(at_work[h]);
        at_work[h] = false;
        lock[h] = false
    }
}

/* A thread that takes a block relies on the bits, which also protect the pages of a batch. */
#define IS_RESIDENT(block) (!used[block] && (page[PAGE_OF(block)] == DIRTY || page[PAGE_OF(block)] == TAKEN))
#define HAS_RESIDENT(h) (IS_RESIDENT(BLOCK(h, 0)) || IS_RESIDENT(BLOCK(h, 1)) || IS_RESIDENT(BLOCK(h, 2)))

/* The caller holds the lock of the block's heap. */
inline hand_out(b) {
    assert(!used[b] && owner[b] == HEAP && page[PAGE_OF(b)] == DIRTY);
    used[b] = true;
    owner[b] = PROGRAM
}

inline take_resident(h) {
    d_step {
        if
        :: IS_RESIDENT(BLOCK(h, 0)) -> hand_out(BLOCK(h, 0))
        :: !IS_RESIDENT(BLOCK(h, 0)) && IS_RESIDENT(BLOCK(h, 1)) -> hand_out(BLOCK(h, 1))
        :: else -> hand_out(BLOCK(h, 2))
        fi
    }
}

/* Makes a page resident: one that was purged, or a new one. Refuses if there is neither. */
inline grow(h) {
    d_step {
        assert(!HAS_RESIDENT(h));
        if
        :: page[PAGE(h, 0)] == CLEAN -> page[PAGE(h, 0)] = DIRTY; hand_out(BLOCK(h, 0))
        :: page[PAGE(h, 0)] != CLEAN && (page[PAGE(h, 1)] == CLEAN || page[PAGE(h, 1)] == ABSENT) ->
            page[PAGE(h, 1)] = DIRTY;
            hand_out(BLOCK(h, 2))
        :: else -> refuses = true
        fi
    }
}

/* The caller holds the heap's lock. */
inline take_or_grow(h) {
    if
    :: HAS_RESIDENT(h) -> take_resident(h)
    :: else -> grow(h)
    fi
}

inline choose_own() {
    if
    :: own = 0
    :: own = 1
    fi
}

inline allocate() {
    choose_own();
    enter(own);
    if
    :: HAS_RESIDENT(own) -> take_resident(own)
    :: else ->
#ifndef OWN_KEPT
        leave(own);
#endif
#ifdef OTHER_UNLOCKED
        enter_unlocked(1 - own);
#else
        enter(1 - own);
#endif
        if
        :: HAS_RESIDENT(1 - own) ->
            take_resident(1 - own);
            leave(1 - own);
#ifdef OWN_KEPT
            leave(own);
#endif
            goto served
        :: else -> leave(1 - own)
        fi;
#ifndef OWN_KEPT
        enter(own);
#endif
#ifdef GROW_UNCHECKED
        grow(own);
#else
        take_or_grow(own);
#endif
        if
        :: refuses ->
            leave(own);
            own = 1 - own;
            refuses = false;
            enter(own);
            take_or_grow(own);
            refuses = false
        :: else -> skip
        fi
    fi;
#ifdef OWN_READ_AGAIN
    choose_own();
#endif
    leave(own);
served:
    own = 0
}

/* The section of a heap whose lock the caller holds. */
#define IN_BATCH(h, i, b) (claims[h] && section[h] <= (i) && (i) < section_end[h] && range[i] == PAGE_OF(b))
#define IS_CLAIMED(h, b) (IN_BATCH(h, 0, b) || IN_BATCH(h, 1, b))

#define IS_MINE(b) (owner[b] == MAGAZINE(me))

inline put(h, b) {
    if
    :: IS_MINE(b) ->
        assert(h == b / HEAP_BLOCKS && used[b] && !IS_CLAIMED(h, b));
        used[b] = false;
        owner[b] = HEAP
    :: else -> skip
    fi
}

inline free_into(h) {
    if
    :: IS_MINE(BLOCK(h, 0)) || IS_MINE(BLOCK(h, 1)) || IS_MINE(BLOCK(h, 2)) ->
#ifdef FREE_UNLOCKED
        enter_unlocked(h);
#else
        enter(h);
#endif
        d_step {
            put(h, BLOCK(h, 0));
            put(h, BLOCK(h, 1));
            put(h, BLOCK(h, 2))
        }
        leave(h)
    :: else -> skip
    fi
}

inline pick(b) {
    if
    :: owner[b] == PROGRAM && picked < 2 -> owner[b] = MAGAZINE(me); picked++
    :: true
    fi
}

inline release() {
    atomic {
        picked = 0;
        pick(0);
        pick(1);
        pick(2);
        pick(3);
        pick(4);
        pick(5);
        picked = 0
    }
#ifdef FREE_TO_OWN
    enter(0);
    d_step {
        put(0, 0);
        put(0, 1);
        put(0, 2);
        put(0, 3);
        put(0, 4);
        put(0, 5)
    }
    leave(0)
#else
    free_into(0);
    free_into(1)
#endif
}

/* The program frees a block that is free. If the block is in use again, no allocator could tell. */
inline release_twice() {
    atomic { select(block : 0 .. BLOCKS - 1) }
    if
    :: page[PAGE_OF(block)] == ABSENT -> skip
    :: else ->
        enter(block / HEAP_BLOCKS);
        d_step {
            if
            :: owner[block] == HEAP ->
#ifdef BATCH_UNREAD
                used[block] = false
#else
                assert(!used[block] || IS_CLAIMED(block / HEAP_BLOCKS, block))
#endif
            :: else -> skip
            fi
        }
        leave(block / HEAP_BLOCKS)
    fi;
    block = 0
}

#ifdef PURGE_IN_USE
#define IS_FREE(p) (page[p] == DIRTY && (!used[FIRST(p)] || !used[LAST(p)]))
#else
#define IS_FREE(p) (page[p] == DIRTY && !used[FIRST(p)] && !used[LAST(p)])
#endif

inline take_page(p) {
    if
    :: IS_FREE(p) && count < RANGES ->
        page[p] = TAKEN;
#ifndef PURGE_UNMARKED
        used[FIRST(p)] = true;
        used[LAST(p)] = true;
#endif
        range[count] = p;
        count++
    :: else -> skip
    fi
}

inline take_pages(h) {
#ifdef PURGE_UNLOCKED
    enter_unlocked(h);
#else
    enter(h);
#endif
    d_step {
        assert(!claims[h]);
        section[h] = count;
        take_page(PAGE(h, 0));
        take_page(PAGE(h, 1));
        section_end[h] = count;
        claims[h] = true
    }
    leave(h)
}

/* The kernel purges a range, or refuses. */
inline ask_kernel(i) {
    if
    :: i < count ->
        if
        :: atomic {
               assert(page[range[i]] == TAKEN && owner[FIRST(range[i])] == HEAP && owner[LAST(range[i])] == HEAP);
               refused[i] = false
           }
        :: refused[i] = true;
#ifdef REFUSED_MOVED
            enter(range[i] / HEAP_PAGES);
            d_step {
                moved = range[i];
                range[i] = range[count - 1];
                range[count - 1] = moved
            }
            leave(moved / HEAP_PAGES)
#endif
        fi
    :: else -> skip
    fi
}

inline put_back_range(h, i) {
    if
    :: section[h] <= i && i < section_end[h] ->
        assert(h == range[i] / HEAP_PAGES && page[range[i]] == TAKEN);
        if
        :: refused[i] -> page[range[i]] = DIRTY
        :: else -> page[range[i]] = CLEAN
        fi;
#ifdef REFUSED_FORGOTTEN
        if
        :: refused[i] -> page[range[i]] = TAKEN
        :: else -> skip
        fi;
#endif
#ifndef PURGE_UNMARKED
        assert(used[FIRST(range[i])] && used[LAST(range[i])]);
#endif
        used[FIRST(range[i])] = false;
        used[LAST(range[i])] = false
    :: else -> skip
    fi
}

inline put_back(h) {
#ifdef PUT_BACK_UNLOCKED
    enter_unlocked(h);
#else
    enter(h);
#endif
    d_step {
#ifdef PUT_BACK_TO_ONE
        section[h] = 0;
        section_end[h] = count;
#endif
        put_back_range(h, 0);
        put_back_range(h, 1);
        claims[h] = false;
        section[h] = 0;
        section_end[h] = 0
    }
    leave(h)
}

/* The caller holds the purger's lock. */
inline take_from_heaps() {
    take_pages(0);
    take_pages(1)
}

inline finish_purge() {
    ask_kernel(0);
    ask_kernel(1);
    put_back(0);
    put_back(1);
    d_step {
        count = 0;
        range[0] = 0;
        range[1] = 0;
        refused[0] = false;
        refused[1] = false
    }
}

#ifndef FORKS
proctype thread(byte me) {
    byte own, picked, block;
    bool refuses;

    do
    :: atomic { operations < OPERATIONS -> operations++ }
        if
        :: allocate()
        :: release()
        :: release_twice()
        fi
    :: atomic { operations == OPERATIONS -> break }
    od;
    finished++
}
#endif

active proctype purger() {
    byte purges;
#ifdef REFUSED_MOVED
    byte moved;
#endif

    {
        do
        :: purges < PURGES ->
            purges++;
            atomic { !purger_lock -> purger_lock = true }
            take_from_heaps();
            finish_purge();
            purger_lock = false
        :: purges == PURGES -> break
        od;
        finished++
    } unless {
        atomic { child -> finished++ }
    }
}

#ifdef FORKS
byte survivor;
/* The forks in handlers that interrupted a holder of a heap's lock. */
byte in_handlers;

#define IS_IN_HANDLER (held != NONE)

inline wait_for_heap(h) {
#ifdef FLAG_BEFORE_LOCK
    flag[h] = true;
#endif
    atomic { !lock[h] -> lock[h] = true; acquired[h] = true }
    flag[h] = true
}

inline acquire_heap(h) {
    if
    :: held == h -> skip
    :: !IS_IN_HANDLER -> wait_for_heap(h)
    :: IS_IN_HANDLER && held != h ->
#ifdef HANDLER_WAITS_FOR_FORKS
        wait_for_heap(h)
#else
        if
        :: atomic { !lock[h] -> lock[h] = true; acquired[h] = true }; flag[h] = true
#ifdef HANDLER_SKIPS_HELD
        :: lock[h] -> skip
#else
        :: flag[h] -> skip
#endif
        fi
#endif
    fi
}

inline acquire_heaps() {
#ifndef FORK_UNLOCKED
#ifdef FORK_IN_ANY_ORDER
    if
    :: me == 0 -> acquire_heap(0); acquire_heap(1)
    :: me == 1 -> acquire_heap(1); acquire_heap(0)
    fi
#else
    acquire_heap(0);
    acquire_heap(1)
#endif
#else
    skip
#endif
}

inline acquire_purger() {
#ifndef FORK_BESIDE_PURGE
    if
    :: has_purger -> skip
    :: atomic { !has_purger && !purger_lock -> purger_lock = true; has_purger = true }
#ifndef HANDLER_WAITS_FOR_PURGER
    :: !has_purger && purger_lock && (IS_IN_HANDLER || has_depot) -> skip
#endif
    fi
#else
    skip
#endif
}

inline free_in_child(h) {
    if
    :: !acquired[h] ->
        flag[h] = false;
#ifndef LOCK_NOT_FREED
        lock[h] = (held == h)
#endif
    :: else -> skip
    fi;
#ifndef BATCH_NOT_LOST
    if
    :: batch_is_lost ->
        claims[h] = false;
        section[h] = 0;
        section_end[h] = 0
    :: else -> skip
    fi
#endif
}

inline start_child() {
    d_step {
        if
        :: purger_lock && !has_purger ->
            batch_is_lost = true;
#ifndef PURGER_NOT_FREED
            purger_lock = false;
#endif
            count = 0
        :: else -> skip
        fi;
        free_in_child(0);
        free_in_child(1);
        assert(!batch_is_lost || IS_IN_HANDLER || has_depot)
    }
}

inline clear_flag(h) {
    if
    :: acquired[h] -> flag[h] = false
    :: else -> skip
    fi
}

inline release_heap(h) {
    if
    :: acquired[h] -> atomic { lock[h] = false; flag[h] = false; acquired[h] = false }
    :: else -> skip
    fi
}

/* Only one of the two may be in a handler that interrupted a holder of a heap's lock. */
inline interrupt() {
    atomic {
#ifdef HANDLERS_OF_BOTH
        true ->
#else
        in_handlers == 0 ->
#endif
        in_handlers++
    }
}

inline lock_purger() {
    atomic { !purger_lock -> purger_lock = true; purges = true; has_purger = true }
}

/* A thread that forks by itself, or in a handler: where it holds a depot's lock, works on a heap, takes pages of the
   second heap for a purge, or has taken pages of both. */
proctype forker(byte me) {
    byte own, picked, held = NONE;
    bool refuses, purges, has_purger, has_depot, acquired[HEAPS];
#ifdef REFUSED_MOVED
    byte moved;
#endif

    {
        if
        :: true
        :: has_depot = true
        :: interrupt(); enter(0); held = 0
        :: interrupt(); enter(1); held = 1
        :: interrupt(); lock_purger(); take_pages(0); enter(1); held = 1
        :: lock_purger(); take_pages(0); take_pages(1)
        fi;
#ifdef FORK_HEAPS_FIRST
        acquire_heaps();
        acquire_purger();
#else
        acquire_purger();
        acquire_heaps();
#endif
        if
        :: atomic {
               me == 0 -> survivor = me;
               child = true
           };
           finished == THREADS + FORKERS;
           start_child()
        :: true
        fi;
#ifndef FLAGS_KEPT
        clear_flag(0);
        clear_flag(1);
#endif
        release_heap(0);
        release_heap(1);
        if
        :: has_purger && !purges -> purger_lock = false; has_purger = false
        :: else -> skip
        fi;
        if
        :: held != NONE ->
            leave(held);
            atomic { held = NONE; in_handlers-- }
        :: else -> skip
        fi;
        if
        :: purges -> finish_purge(); purger_lock = false
        :: else -> skip
        fi;
        if
        :: child ->
            atomic { !purger_lock -> purger_lock = true }
            take_from_heaps();
            finish_purge();
            purger_lock = false;
            allocate();
            release()
        :: else -> skip
        fi;
        finished++
    } unless {
        atomic { child && survivor != me -> finished++ }
    }
}
#endif

init {
    atomic {
        page[0] = DIRTY;
        page[1] = ABSENT;
        page[2] = DIRTY;
        page[3] = ABSENT;
#ifdef FORKS
        run forker(0);
        run forker(1)
#else
        used[0] = true;
        owner[0] = PROGRAM;
        used[1] = true;
        owner[1] = PROGRAM;
        used[3] = true;
        owner[3] = PROGRAM;
        run thread(0);
        run thread(1)
#endif
    }
}

#define IS_LEFT(h) (!lock[h] && !flag[h] && !at_work[h] && !claims[h])
#define IS_WHOLE(b) (used[b] == (owner[b] != HEAP || page[PAGE_OF(b)] == TAKEN))

active proctype quiet() {
    timeout;
    assert(finished == THREADS + FORKERS + 1);
    assert(!purger_lock && IS_LEFT(0) && IS_LEFT(1));
    assert(child || owner[0] <= PROGRAM && owner[1] <= PROGRAM && owner[2] <= PROGRAM);
    assert(child || owner[3] <= PROGRAM && owner[4] <= PROGRAM && owner[5] <= PROGRAM);
    assert(batch_is_lost || page[0] != TAKEN && page[1] != TAKEN);
    assert(batch_is_lost || page[2] != TAKEN && page[3] != TAKEN);
    assert(IS_WHOLE(0) && IS_WHOLE(1) && IS_WHOLE(2) && IS_WHOLE(3) && IS_WHOLE(4) && IS_WHOLE(5))
}
