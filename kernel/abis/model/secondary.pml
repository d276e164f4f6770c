/*
 * The insertion of a translation past the page table: a second hierarchy of tables, one page for each level, that the
 * core loads for a moment under the same address-space identifier, and what the core's cache of paging structures keeps
 * of it. One core; two identifiers; addresses in two regions (of 2 MiB) that have the same place in a last table.
 *
 *   insert an address (interrupts off)               hardware, at any time, for the loaded identifier
 *     the page table has its entry                     load a region's pointer to its last table
 *     flush the address                                go on from that, or from the root, and fill the TLB;
 *     second: region -> last table -> page               past an empty entry: nothing
 *     load second; read; load the page table           forget anything
 *     second: empty again, both
 *
 * The one last table of the second hierarchy serves all addresses in turn. A region's pointer to it that hardware has
 * cached outlives the insertion; used during another insertion, it gives an address the other's page. So:
 *
 *   - The flush of an address, which on x86 drops all cached pointers of the loaded identifier, stands before the
 *     second hierarchy is filled.
 *   - Old regions must not lead to the last table when the second hierarchy is loaded again.
 *   - The last table is empty whenever another identifier may be loaded, whose pointers that flush does not drop.
 *
 * The paper does the last of the three. That is enough where nothing caches pointers, as in an emulator.
 *
 * Abstracted: accessed (decision.pml); of the upper tables only what a region's pointer is.
 *
 * @claim own safety: the TLB has an address's own page, and only while it is mapped
 * @mutation NOT_FLUSHED own assertion: pointers from earlier insertions stay
 * @mutation FLUSHED_LATE own assertion: they are dropped when the second hierarchy is filled already
 * @mutation REGION_LEFT own assertion: the second hierarchy keeps the old region's pointer
 * @mutation ENTRY_LEFT own assertion: its last table keeps the entry
 */
#define ADDRESSES 3

/* Two addresses of one address space, and one of another. */
#define SPACE(address) ((address) / 2)
#define REGION(address) (1 << ((address) % 2))
#define OWN(address) ((address) + 1)

mtype = { TABLE, SECOND };

/* The page tables; the second hierarchy: the regions that lead to its last table, and the page in that. */
bool mapped[ADDRESSES];
byte regions, entry;

/* What is loaded. */
mtype root = TABLE;
bool space;

/* What the core has cached: pointers to last tables, translations. */
mtype pointer[ADDRESSES];
byte tlb[ADDRESSES];

#define VIA(address, table) (pointer[address] == table || pointer[address] == 0 && root == table)
#define LEADS(address) (pointer[address] == SECOND || (regions & REGION(address)) != 0)

#define MISSED(address) (space == SPACE(address) && tlb[address] == 0)

#define HARDWARE(address) \
    :: d_step { space == SPACE(address) && pointer[address] == 0 && root == TABLE -> pointer[address] = TABLE } \
    :: d_step { \
           space == SPACE(address) && pointer[address] == 0 && root == SECOND && LEADS(address) -> \
           pointer[address] = SECOND \
       } \
    :: d_step { MISSED(address) && VIA(address, TABLE) && mapped[address] -> tlb[address] = OWN(address) } \
    :: d_step { MISSED(address) && VIA(address, SECOND) && LEADS(address) && entry != 0 -> tlb[address] = entry } \
    :: atomic { tlb[address] != 0 -> assert(tlb[address] == OWN(address) && mapped[address]) } \
    :: d_step { tlb[address] != 0 -> tlb[address] = 0 } \
    :: d_step { pointer[address] != 0 -> pointer[address] = 0 }

active proctype hardware() {
    do
    HARDWARE(0)
    HARDWARE(1)
    HARDWARE(2)
    od
}

inline flush(address) {
    d_step {
        tlb[address] = 0;
        pointer[address] = 0;
        if
        :: SPACE(address) == 0 -> pointer[0] = 0; pointer[1] = 0
        :: else -> skip
        fi
    }
}

active proctype kernel() {
    byte address;

    do
    :: atomic {
           if
           :: space == SPACE(0) && !mapped[0] -> address = 0
           :: space == SPACE(1) && !mapped[1] -> address = 1
           :: space == SPACE(2) && !mapped[2] -> address = 2
           fi;
           mapped[address] = true
       };
#if !defined NOT_FLUSHED && !defined FLUSHED_LATE
        flush(address);
#endif
#ifdef REGION_LEFT
        regions = regions | REGION(address);
#else
        regions = REGION(address);
#endif
        entry = OWN(address);
#ifdef FLUSHED_LATE
        flush(address);
#endif
        root = SECOND;
        /* Read: until the hardware has walked. */
        tlb[address] != 0;
        root = TABLE;
#ifndef ENTRY_LEFT
        entry = 0;
#endif
#ifndef REGION_LEFT
        regions = 0;
#endif
        address = 0
    :: atomic {
           if
           :: mapped[0] -> address = 0
           :: mapped[1] -> address = 1
           :: mapped[2] -> address = 2
           fi;
           mapped[address] = false;
           flush(address);
           address = 0
       }
    :: space = !space
    od
}
