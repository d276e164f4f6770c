/*
 * The decision whom a flush must reach: one page-table entry, its software entry, the TLBs of three cores, and two
 * threads of the kernel that change the entry under the lock of its page table.
 *
 *   decide                                        accessed or NONE: every core; UNCACHED or two versions old: no core;
 *                                                 with an owner: that core, or none if it has flushed everything
 *                                                 since; else: every core
 *   fault                                         set the entry, accessed clear; software entry = {core, its count of
 *                                                 full flushes}; load the core's own TLB past the entry (interrupts off)
 *   clear and flush                               exchange for nothing; decide; flush; software entry = UNCACHED
 *   clear or change, flush later                  exchange; decide; accessed? software entry = {any, version now};
 *                                                 unlock; flush
 *   unmap what is empty                           decide as if it had been there: others may have yet to flush it
 *   clear accessed                                was it set? software entry = {any, version now}
 *   raise rights                                  by compare-and-swap: accessed stays; if clear, and no other core can
 *                                                 have the entry, then as after a fault
 *
 * A software entry covers all that may be cached of its slot, whatever was there before. So what a fault writes must
 * cover it too: an owner only if no flush of what was there is outstanding (`flushing`), or if the software entry
 * says that no other core can have it; else it stays as it is. Without that a page that is unmapped, mapped again at the same place
 * before the flush, and unmapped again is free while a core that nobody knows of still has it.
 *
 * Hardware: a walk sets accessed and fills the TLB in one step. Between the two a real one has the translation in
 * flight, and a flush kills it there, as it would in the TLB: nothing else could be told apart. A core may lose any
 * translation, use it, or flush everything at any time.
 *
 * Abstracted: a version ends when all three cores have flushed in it, and software entries without an owner are as old
 * as the versions that ended since: two is as good as UNCACHED (version.pml is how that is kept, and how versions wrap).
 * With an owner they become UNCACHED when it flushes: by a count that wraps they look younger, never older. A core that
 * is to be flushed is so at once, or when its interrupts are on again (mailbox.pml is for those who sleep). The second
 * hierarchy is the core's own (secondary.pml).
 *
 * Whatever an operation is to remove from the TLBs when it changes the entry is in `removed`; what of that is left when
 * it has finished is `stale`, and must not be used.
 *
 * @claim unmapped safety: no core uses a translation to a page after an operation that unmapped it has finished
 * @claim protected safety PROTECT: nor writes by one after an operation that write-protected the page has finished
 * @claim counted safety PROTECT COUNTED: both, if instead faults record their core over anything, and whoever decides
 *   while another's flush is outstanding decides for every core
 * @mutation NAIVE unmapped assertion: the core walks the page table to fill its TLB, then the kernel clears accessed
 * @mutation SECONDARY_SHARED unmapped assertion: another core may walk the secondary hierarchy
 * @mutation INTERRUPTIBLE unmapped assertion: the core may flush between reading its count and the insertion
 * @mutation SLOT_OVERLOOKED unmapped assertion: a fault records its core over what is not yet flushed
 * @mutation NOT_ATOMIC unmapped assertion: accessed is read before the entry is cleared
 * @mutation ACCESSED_OVERLOOKED unmapped assertion: the owner is believed though accessed is set
 * @mutation LATE_ACCESSED unmapped assertion: the hardware sets accessed some time after it has filled the TLB
 * @mutation GAP_ONE unmapped assertion: a software entry one version old is believed
 * @mutation VERSION_EARLY unmapped assertion: the version is read before accessed is cleared
 * @mutation YOUNG_KEPT unmapped assertion: accessed is cleared and the owner stays
 * @mutation OWNER_OVERLOOKED unmapped assertion: any core's full flush is taken for the owner's
 * @mutation LATER_UNCACHED unmapped assertion: an accessed entry whose flush comes later is UNCACHED at once
 * @mutation LATER_KEPT unmapped assertion: it keeps its owner
 * @mutation UNCACHED_EARLY unmapped assertion: clear and flush drops the lock before the flush, as UNCACHED
 * @mutation NESTED_OVERLOOKED unmapped assertion: who finds nothing to unmap does not flush for others who did
 * @mutation FINISHED_EARLY unmapped assertion: the page is free before its flush is done
 * @mutation PROTECTED_EARLY protected assertion: the page is taken for write-protected before the flush is done
 * @mutation PLAIN_STORE protected assertion: rights are raised by a load and a store: accessed may be lost
 * @mutation OWNER_BY_RAISE protected assertion: a write fault on a page that is mapped records its core
 */
#define CORES 3
#define ALL 7
#define BIT(core) (1 << (core))

/* Ages of a software entry: versions that ended since, or one of two other values. An owner is a core + 1, or ANY. */
#define NONE 2
#define UNCACHED 3
#define ANY 0
#ifdef GAP_ONE
#define LAST_AGE 0
#else
#define LAST_AGE 1
#endif

#ifdef PROTECT
#define PAGES 1
#else
#define PAGES 2
#endif

/* The entry; the software entry. */
byte page;
bool writable, accessed;
byte age = NONE, owner = ANY;

/* A TLB's entry: a page and the right to write to it. */
byte tlb[CORES];
#define TRANSLATION(page, writable) ((page) * 2 + (writable))

bool locked;
/* Operations between the change of the entry and the end of their flush, if that comes after the lock. */
byte flushing;
/* The core in the middle of an insertion, + 1. */
byte inserting;
/* Cores that have not flushed everything in this version. */
byte pending = ALL;
#ifdef VERSION_EARLY
byte read_age = NONE;
#endif
#ifdef LATE_ACCESSED
byte late;
#endif

/* What only the claims look at. */
byte removed[2], stale;

inline set_software(new_age, new_owner) {
    age = new_age;
    owner = new_owner
}

inline lose(core) {
    tlb[core] = 0;
    removed[0] = removed[0] & ~BIT(core);
    removed[1] = removed[1] & ~BIT(core);
    stale = stale & ~BIT(core)
}

#ifdef OWNER_OVERLOOKED
#define IS_OWNERS(core) (owner != ANY)
#else
#define IS_OWNERS(core) (owner == (core) + 1)
#endif

inline flush_everything(core) {
    lose(core);
    if
    :: age < NONE && IS_OWNERS(core) -> set_software(UNCACHED, ANY)
    :: else -> skip
    fi;
    pending = pending & ~BIT(core);
    if
    :: pending == 0 ->
        pending = ALL;
        if
        :: age < LAST_AGE && owner == ANY -> age++
        :: age == LAST_AGE && owner == ANY -> set_software(UNCACHED, ANY)
        :: else -> skip
        fi;
#ifdef VERSION_EARLY
        if
        :: read_age < LAST_AGE -> read_age++
        :: read_age == LAST_AGE -> read_age = UNCACHED
        :: else -> skip
        fi
#endif
    :: else -> skip
    fi
}

#ifdef INTERRUPTIBLE
#define INTERRUPTS_ON(core) true
#else
#define INTERRUPTS_ON(core) (inserting != core + 1)
#endif

#define USE(core) \
    :: atomic { tlb[core] != 0 -> assert((stale & BIT(core)) == 0) } \
    :: d_step { tlb[core] != 0 -> lose(core) } \
    :: d_step { INTERRUPTS_ON(core) -> flush_everything(core) }

#ifdef LATE_ACCESSED
#define WALK(core) \
    :: d_step { page != 0 && tlb[core] == 0 -> tlb[core] = TRANSLATION(page, writable); late = late | BIT(core) } \
    :: d_step { (late & BIT(core)) != 0 -> late = late & ~BIT(core); accessed = accessed || page != 0 }
#else
#define WALK(core) \
    :: d_step { page != 0 && tlb[core] == 0 -> accessed = true; tlb[core] = TRANSLATION(page, writable) }
#endif

#ifdef SECONDARY_SHARED
#define WALK_SECONDARY(core) \
    :: d_step { inserting != 0 && tlb[core] == 0 -> tlb[core] = TRANSLATION(page, writable) }
#else
#define WALK_SECONDARY(core)
#endif

active proctype hardware() {
    do
    USE(0) WALK(0) WALK_SECONDARY(0)
    USE(1) WALK(1) WALK_SECONDARY(1)
    USE(2) WALK(2) WALK_SECONDARY(2)
    od
}

#ifdef ACCESSED_OVERLOOKED
#define BELIEVED(was_accessed) true
#elif defined COUNTED
#define BELIEVED(was_accessed) (!was_accessed && flushing == 0)
#else
#define BELIEVED(was_accessed) !was_accessed
#endif

/* Leaves in `targets` whom to flush. */
inline decide(was_accessed) {
    if
    :: BELIEVED(was_accessed) && age == UNCACHED -> targets = 0
    :: BELIEVED(was_accessed) && age < NONE && owner != ANY -> targets = BIT(owner - 1)
    :: else -> targets = ALL
    fi
}

#define FLUSH(core) \
    if \
    :: d_step { (targets & BIT(core)) != 0 && INTERRUPTS_ON(core) -> lose(core); targets = targets & ~BIT(core) } \
    :: (targets & BIT(core)) == 0 \
    fi

inline flush() {
    FLUSH(0);
    FLUSH(1);
    FLUSH(2)
}

#define HOLDS(core, least, most) (tlb[core] >= (least) && tlb[core] <= (most)) * BIT(core)

/* What this operation is to remove. */
inline to_remove(least, most) {
    removed[me] = HOLDS(0, least, most) + HOLDS(1, least, most) + HOLDS(2, least, most)
}

inline finish() {
    stale = stale | removed[me];
    removed[me] = 0
}

#if defined SLOT_OVERLOOKED || defined COUNTED
#define MAY_OWN(core) true
#else
#define MAY_OWN(core) (flushing == 0 || age == UNCACHED || age < NONE && owner == (core) + 1)
#endif

#ifdef OWNER_BY_RAISE
#define MAY_RAISE(core) true
#else
#define MAY_RAISE(core) (age == UNCACHED || age < NONE && owner == (core) + 1)
#endif

inline fault() {
    select(core : 0 .. CORES - 1);
    select(page : 1 .. PAGES);
#ifdef PROTECT
    if
    :: writable = false
    :: writable = true
    fi;
#endif
    accessed = false;
    if
    /* By the code that knows nothing of all this. */
    :: set_software(NONE, ANY); accessed = true; core = CORES
    /* One of the neighbours that are mapped along with it, and not inserted. */
    :: MAY_OWN(CORES) -> set_software(UNCACHED, ANY); core = CORES
    :: !MAY_OWN(core) -> core = CORES
    :: MAY_OWN(core) ->
        set_software(0, core + 1);
        inserting = core + 1
    fi;
    if
    :: core == CORES -> locked = false
    :: else -> skip
    fi
}

inline insert() {
    if
    :: core != CORES ->
#ifdef NAIVE
        d_step {
            if
            :: tlb[core] == 0 -> accessed = true; tlb[core] = TRANSLATION(page, writable)
            :: else -> skip
            fi
        }
        accessed = false;
#endif
        atomic {
#ifndef NAIVE
            /* A translation of what was there before may still be in the way, and stay. */
            if
            :: tlb[core] == 0 -> tlb[core] = TRANSLATION(page, writable)
            :: tlb[core] != 0 -> skip
            fi;
#endif
            inserting = 0;
            locked = false
        }
    :: else -> skip
    fi;
    core = 0
}

/* The entry becomes empty; `was` has what accessed was. */
inline change() {
#ifndef NOT_ATOMIC
    was = accessed;
#endif
    decide(was);
    to_remove(TRANSLATION(page, protects), TRANSLATION(page, true));
    kept = protects * page;
    page = 0;
    accessed = false;
    writable = false;
    if
    :: later ->
        flushing++;
#ifdef LATER_UNCACHED
        set_software(UNCACHED, ANY)
#elif !defined LATER_KEPT
        if
        :: was -> set_software(0, ANY)
        :: else -> skip
        fi
#endif
    :: else -> skip
    fi;
    was = false
}

/* Or, if it is the page's rights that change, the entry comes back with accessed clear. */
inline unlock() {
    page = kept;
    kept = 0;
    locked = false
}

proctype kernel(bool me) {
    byte core, targets, kept;
    bool was, later, protects;

    do
    :: atomic { !locked && page == 0 -> locked = true; fault() };
        insert()
    /* Clear and flush; clear or change, and flush later. */
    :: atomic {
           !locked && page != 0 -> locked = true;
           if
           :: later = false
           :: later = true
           fi;
#ifdef PROTECT
           if
           :: protects = false
           :: protects = true
           fi;
#endif
#ifdef NOT_ATOMIC
           was = accessed
       };
       atomic {
#endif
           change()
       };
        if
        :: later ->
            unlock();
#if !defined FINISHED_EARLY && !defined PROTECTED_EARLY
            flush();
            atomic { flushing--; finish() }
#else
            finish();
            flush();
            flushing--
#endif
        :: else ->
#ifdef UNCACHED_EARLY
            atomic { set_software(UNCACHED, ANY); unlock() };
            flush();
            finish()
#else
            flush();
            atomic { set_software(UNCACHED, ANY); unlock(); finish() }
#endif
        fi;
        atomic { later = false; protects = false }
    /* Somebody else has unmapped it, and has not flushed yet. */
    :: atomic {
           !locked && page == 0 && flushing != 0 -> flushing++;
           to_remove(TRANSLATION(1, false), TRANSLATION(PAGES, true));
#ifndef NESTED_OVERLOOKED
           decide(false)
#endif
       };
        flush();
        atomic { flushing--; finish() }
    /* Clear accessed. */
    :: atomic {
           !locked && page != 0 && accessed -> locked = true;
#ifdef VERSION_EARLY
           read_age = 0
       };
       atomic {
#endif
           accessed = false
       };
        atomic {
#ifdef VERSION_EARLY
            set_software(read_age, ANY);
            read_age = NONE;
#elif !defined YOUNG_KEPT
            set_software(0, ANY);
#endif
            locked = false
        }
#ifdef PROTECT
    /* Raise rights. */
    :: atomic {
           !locked && page != 0 && !writable -> locked = true;
#ifdef PLAIN_STORE
           was = accessed
       };
       atomic {
           accessed = was;
           was = false;
#endif
           writable = true;
           select(core : 0 .. CORES - 1);
           if
           :: !accessed && MAY_RAISE(core) ->
               set_software(0, core + 1);
               inserting = core + 1
           :: else ->
               core = CORES;
               locked = false
           fi
       };
        insert()
#endif
    od
}

init {
    atomic {
        run kernel(0);
        run kernel(1)
    }
}
