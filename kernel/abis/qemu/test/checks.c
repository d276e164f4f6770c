/* What the emulated CPU is to do with its TLB and with the flags of page table entries. Some of it is this
 * emulator's own choice where the architecture leaves one, such as that a translation is kept: what the
 * kernels are counted by rests on it. */
#include "machine.h"

enum { PAGE_USED = 0x70, PAGE_OTHER = 0x71, PCID = 5, PCID_OTHER = 6 };
enum { KEPT = 1000, CHANGED = 1001 };
/* Of the entries of user pages, with all flags but the one of access. */
#define OPEN               (PRESENT | WRITABLE | USER | DIRTY)
#define UNUSED_ADDRESS_BIT (1UL << 51)
#define NOT_CANONICAL      (1UL << 47)
#define INTERRUPT_BYTES    (0xcdUL | VECTOR_DONE << 8)
#define MSR_FS_BASE        0xc0000100U

struct invpcid_descriptor {
    uint64_t pcid;
    uint64_t address;
};

static const enum mode both_modes[] = {IN_KERNEL, IN_USER};

extern const uint32_t pcide_faulted_early;
void run_checks(void);

static unsigned checked, failed;

static void check(bool good, const char *what) {
    checked++;
    if (!good) {
        failed++;
        print("FAILED: ");
        print(what);
        print("\n");
    }
}

static uint64_t value(void) {
    return this_cpu()->value;
}

/* These return the vector of a fault, or 0. The kernel's accesses have AC set. */
static uint64_t read_as(enum mode mode, unsigned page) {
    return attempt(mode == IN_USER ? in_user_page(user_read) : kernel_read_ac, address_of(page), 0, mode);
}

static uint64_t write_as(enum mode mode, unsigned page, uint64_t what) {
    return attempt(mode == IN_USER ? in_user_page(user_write) : kernel_write_ac, address_of(page), what,
                   mode);
}

static uint64_t execute_as(enum mode mode, unsigned page) {
    return attempt(mode == IN_USER ? in_user_page(user_execute) : kernel_execute, address_of(page), 0, mode);
}

static bool reads(enum mode mode, uint64_t expected) {
    return read_as(mode, PAGE_USED) == 0 && value() == expected;
}

static bool faulted(uint64_t vector, uint64_t error) {
    return vector == PAGE_FAULT && this_cpu()->error == error;
}

static uint64_t *entry(void) {
    return entry_of(PRIMARY, PAGE_USED);
}

static uint64_t frame(unsigned number) {
    return (uintptr_t)frame_of(number);
}

/* The page is mapped anew, in nobody's TLB, and its frame says what it says at the start. */
static void map(uint64_t flags) {
    *frame_of(0) = KEPT;
    *frame_of(1) = CHANGED;
    *entry() = flags ? frame(0) | flags : 0;
    *entry_of(SECONDARY, PAGE_USED) = 0;
    write_cr3(root_of(PRIMARY) | (read_cr4() & CR4_PCIDE ? PCID : 0));
}

/* As map(), and then the page table is changed behind the TLB's back. */
static void cache_and_change(enum mode mode) {
    map(OPEN);
    check(reads(mode, KEPT), "a page is read");
    *entry() = frame(1) | OPEN;
    check(reads(mode, KEPT), "a translation is kept until it is invalidated");
}

static bool flag(uint64_t flags) {
    return *(volatile uint64_t *)entry() & flags;
}

static void clear(uint64_t flags) {
    __atomic_fetch_and(entry(), ~flags, __ATOMIC_SEQ_CST);
}

static void check_pcid_rules(void) {
    uint32_t registers[4];
    cpuid(1, 0, registers);
    check(registers[2] & 1U << 17, "CPUID has PCID");
    cpuid(7, 0, registers);
    check(registers[1] & 1U << 10, "CPUID has INVPCID");
    check(pcide_faulted_early, "#GP: PCIDE outside long mode");
    uint64_t root = root_of(PRIMARY), cr4 = read_cr4();
    check(attempt(set_cr3, root | CR3_NOFLUSH, 0, IN_KERNEL) == PROTECTION, "#GP: bit 63 without PCIDE");
    check(attempt(set_cr3, root | 0x8, 0, IN_KERNEL) == 0, "CR3 may have PWT");
    check(attempt(set_cr4, cr4 | CR4_PCIDE, 0, IN_KERNEL) == PROTECTION,
          "#GP: PCIDE with other identifiers than 0");
    write_cr3(root);
    check(attempt(set_cr4, cr4 | CR4_PCIDE, 0, IN_KERNEL) == 0 && read_cr4() & CR4_PCIDE, "PCIDE may be set");
    check(attempt(set_cr4, read_cr4() | 1UL << 31, 0, IN_KERNEL) == PROTECTION, "#GP: a reserved bit in CR4");
    check(attempt(set_cr3, root | 1UL << 62, 0, IN_KERNEL) == PROTECTION, "#GP: bit 62 in CR3");
    check(attempt(set_cr3, root | UNUSED_ADDRESS_BIT | CR3_NOFLUSH, 0, IN_KERNEL) == PROTECTION,
          "#GP: an address in CR3 that is too high");
    check(attempt(set_cr0, read_cr0() & ~CR0_PG, 0, IN_KERNEL) == PROTECTION,
          "#GP: no paging while PCIDE is set");
    check(attempt(set_cr3, root | PCID | CR3_NOFLUSH, 0, IN_KERNEL) == 0 && read_cr3() == (root | PCID),
          "CR3 takes another identifier and does not keep bit 63");
}

static void check_noflush(enum mode mode) {
    uint64_t root = root_of(PRIMARY);
    cache_and_change(mode);
    write_cr3(root | PCID | CR3_NOFLUSH);
    check(reads(mode, KEPT), "CR3 with bit 63 keeps translations");
    check(read_cr3() == (root | PCID), "and does not keep bit 63");
    write_cr3(root | PCID);
    check(reads(mode, CHANGED), "CR3 without bit 63 flushes");

    map(OPEN);
    *entry_of(SECONDARY, PAGE_USED) = frame(1) | OPEN;
    check(reads(mode, KEPT), "a page is read by the first identifier");
    write_cr3(root_of(SECONDARY) | PCID_OTHER | CR3_NOFLUSH);
    check(reads(mode, CHANGED), "a page is read by the second identifier");
    write_cr3(root | PCID | CR3_NOFLUSH);
    check(reads(mode, KEPT), "a page is read by the first identifier again");
    write_cr3(root_of(SECONDARY) | PCID | CR3_NOFLUSH);
    check(reads(mode, KEPT), "another hierarchy has the translations of the same identifier");

    map(OPEN);
    write_cr3(root);
    check(reads(mode, KEPT), "a page is read by identifier 0");
    *entry() = frame(1) | OPEN;
    write_cr4(read_cr4() & ~CR4_PCIDE);
    check(reads(mode, CHANGED), "clearing PCIDE flushes");
    write_cr4(read_cr4() | CR4_PCIDE);
}

/* What the kernel does at a page fault: the page is read through another hierarchy, so that the entry in its
 * own is valid, unread and in this CPU's TLB. */
static void insert_by_secondary(uint64_t flags) {
    map(0);
    uint64_t translation = frame(0) | flags;
    write_cr3(root_of(SECONDARY) | PCID | CR3_NOFLUSH);
    *entry() = translation;
    *entry_of(SECONDARY, PAGE_USED) = translation;
    check(reads(IN_KERNEL, KEPT), "a page is read through another hierarchy");
    write_cr3(root_of(PRIMARY) | PCID | CR3_NOFLUSH);
    *entry_of(SECONDARY, PAGE_USED) = 0;
}

static void check_insertion(void) {
    insert_by_secondary(OPEN);
    check(reads(IN_USER, KEPT) && reads(IN_KERNEL, KEPT), "an inserted page is read");
    check(!write_as(IN_USER, PAGE_USED, KEPT) && !write_as(IN_KERNEL, PAGE_USED, KEPT), "and written");
    check(!flag(ACCESSED), "accesses by an inserted translation leave the flag clear");
    invalidate(address_of(PAGE_USED));
    check(reads(IN_USER, KEPT) && flag(ACCESSED), "after an invalidation the flag is set");

    insert_by_secondary(OPEN & ~DIRTY);
    check(reads(IN_USER, KEPT) && !flag(ACCESSED | DIRTY), "a clean page is read with no flag set");
    check(!write_as(IN_USER, PAGE_USED, KEPT) && flag(ACCESSED) && flag(DIRTY), "its first write sets both");
}

static void check_sharing(void) {
    for (unsigned i = 0; i < 2; i++) {
        enum mode first = both_modes[i], second = both_modes[!i];
        map(OPEN);
        check(reads(first, KEPT) && flag(ACCESSED), "a walk sets the flag");
        clear(ACCESSED);
        check(reads(second, KEPT) && !flag(ACCESSED), "a read in the other mode does not walk");
        check(!write_as(second, PAGE_USED, KEPT) && !flag(ACCESSED), "nor does a write");
        invalidate(address_of(PAGE_USED));
        check(reads(second, KEPT) && flag(ACCESSED), "an invalidation is of both modes");

        map(OPEN & ~DIRTY);
        check(!write_as(first, PAGE_USED, KEPT) && flag(ACCESSED) && flag(DIRTY), "a write sets both flags");
        clear(ACCESSED | DIRTY);
        check(!write_as(second, PAGE_USED, KEPT) && !flag(ACCESSED | DIRTY),
              "one in the other mode sets none");

        map(OPEN & ~DIRTY);
        check(reads(first, KEPT) && flag(ACCESSED) && !flag(DIRTY), "a read leaves a page clean");
        clear(ACCESSED);
        check(!write_as(second, PAGE_USED, KEPT) && flag(ACCESSED) && flag(DIRTY), "its first write walks");
    }
}

static void check_protection(void) {
    map(OPEN);
    check(reads(IN_USER, KEPT), "user mode reads a page");
    check(faulted(attempt(kernel_read, address_of(PAGE_USED), 0, IN_KERNEL), FAULT_PRESENT),
          "#PF: SMAP keeps the kernel out, whatever the TLB has");
    check(reads(IN_KERNEL, KEPT), "not where AC is set");
    check(faulted(attempt(kernel_write, address_of(PAGE_USED), 0, IN_KERNEL), FAULT_PRESENT | FAULT_WRITE),
          "#PF: SMAP, after an access with AC");
    write_cr4(read_cr4() & ~CR4_SMAP);
    check(attempt(kernel_read, address_of(PAGE_USED), 0, IN_KERNEL) == 0, "without SMAP the kernel reads it");
    write_cr4(read_cr4() | CR4_SMAP);

    map(PRESENT | WRITABLE | DIRTY);
    check(reads(IN_KERNEL, KEPT) && attempt(kernel_read, address_of(PAGE_USED), 0, IN_KERNEL) == 0,
          "the kernel reads a page of its own");
    check(faulted(read_as(IN_USER, PAGE_USED), FAULT_PRESENT | FAULT_USER), "#PF: user mode does not");

    map(PRESENT | USER | DIRTY);
    check(reads(IN_USER, KEPT), "user mode reads a read-only page");
    check(faulted(write_as(IN_KERNEL, PAGE_USED, KEPT), FAULT_PRESENT | FAULT_WRITE),
          "#PF: the kernel writes a read-only page");
    write_cr0(read_cr0() & ~CR0_WP);
    check(reads(IN_USER, KEPT) && !write_as(IN_KERNEL, PAGE_USED, KEPT), "without CR0.WP it may");
    check(faulted(write_as(IN_USER, PAGE_USED, KEPT), FAULT_PRESENT | FAULT_WRITE | FAULT_USER),
          "#PF: user mode still may not");
    write_cr0(read_cr0() | CR0_WP);
    check(faulted(write_as(IN_KERNEL, PAGE_USED, KEPT), FAULT_PRESENT | FAULT_WRITE), "#PF: CR0.WP is back");

    map(OPEN);
    *frame_of(0) = INTERRUPT_BYTES;
    check(execute_as(IN_USER, PAGE_USED) == 0, "user mode executes a page");
    check(faulted(execute_as(IN_KERNEL, PAGE_USED), FAULT_PRESENT | FAULT_FETCH),
          "#PF: SMEP keeps the kernel out");
    clear(ACCESSED);
    check(reads(IN_KERNEL, INTERRUPT_BYTES) && !flag(ACCESSED),
          "a page that was executed is read without a walk");
    write_cr4(read_cr4() & ~CR4_SMEP);
    check(execute_as(IN_USER, PAGE_USED) == 0 && execute_as(IN_KERNEL, PAGE_USED) == 0,
          "without SMEP both may");
    write_cr4(read_cr4() | CR4_SMEP);

    map(OPEN | NO_EXECUTE);
    *frame_of(0) = INTERRUPT_BYTES;
    check(reads(IN_KERNEL, INTERRUPT_BYTES), "the kernel reads a page that is not to be executed");
    check(faulted(execute_as(IN_USER, PAGE_USED), FAULT_PRESENT | FAULT_USER | FAULT_FETCH),
          "#PF: user mode executes it");
}

/* Both bits of a key's part of PKRU. */
static uint32_t deny(unsigned key, unsigned bits) {
    return bits << 2 * key;
}

static void check_keys(void) {
    enum { KEY_USED = 3, ACCESS = 1, WRITE = 2 };
    write_cr4(read_cr4() | CR4_PKE);
    for (unsigned i = 0; i < 2; i++) {
        enum mode first = both_modes[i], second = both_modes[!i];
        uint64_t user = second == IN_USER ? FAULT_USER : 0;
        write_pkru(0);
        map(OPEN | KEY(KEY_USED));
        check(reads(first, KEPT) && !write_as(second, PAGE_USED, KEPT),
              "a page with a key is read and written");
        write_pkru(deny(KEY_USED, WRITE));
        check(reads(first, KEPT), "a key that denies writes lets it be read");
        check(faulted(write_as(second, PAGE_USED, KEPT), FAULT_PRESENT | FAULT_WRITE | FAULT_KEY | user),
              "#PF: a key that denies writes");
        write_pkru(deny(KEY_USED, ACCESS));
        check(faulted(read_as(second, PAGE_USED), FAULT_PRESENT | FAULT_KEY | user),
              "#PF: a key that denies all");
    }
    write_pkru(deny(KEY_USED, WRITE));
    write_cr0(read_cr0() & ~CR0_WP);
    map(OPEN | KEY(KEY_USED));
    check(reads(IN_USER, KEPT) && !write_as(IN_KERNEL, PAGE_USED, KEPT),
          "without CR0.WP the kernel writes it");
    check(faulted(write_as(IN_USER, PAGE_USED, KEPT), FAULT_PRESENT | FAULT_WRITE | FAULT_KEY | FAULT_USER),
          "#PF: user mode does not");
    write_cr0(read_cr0() | CR0_WP);
    write_pkru(0);
    write_cr4(read_cr4() & ~CR4_PKE);
}

static uint64_t invpcid(uint64_t type, uint64_t pcid, uint64_t address) {
    const struct invpcid_descriptor descriptor = {pcid, address};
    return attempt(do_invpcid, type, (uintptr_t)&descriptor, IN_KERNEL);
}

static void check_invpcid(enum mode mode) {
    uint64_t address = address_of(PAGE_USED);
    cache_and_change(mode);
    check(invpcid(0, PCID_OTHER, address) == 0 && reads(mode, KEPT),
          "INVPCID of an address, another identifier");
    check(invpcid(1, PCID_OTHER, 0) == 0 && reads(mode, KEPT), "INVPCID of another identifier");
    check(invpcid(0, PCID, address_of(PAGE_OTHER)) == 0 && reads(mode, KEPT), "INVPCID of another address");
    check(invpcid(0, PCID, address) == 0 && reads(mode, CHANGED), "INVPCID of an address");
    for (uint64_t type = 1; type < 4; type++) {
        cache_and_change(mode);
        check(invpcid(type, type == 1 ? PCID : 0, NOT_CANONICAL) == 0 && reads(mode, CHANGED),
              "INVPCID of an identifier, and of all");
    }
}

static void switch_to(uint64_t pcid) {
    write_cr3(root_of(PRIMARY) | pcid | CR3_NOFLUSH);
}

/* Leaves a translation of PCID alone, of which the page table knows nothing any more, and goes elsewhere. */
static void leave_translation(enum mode mode) {
    write_cr3(root_of(PRIMARY) | PCID_OTHER);
    cache_and_change(mode);
    switch_to(PCID_OTHER);
}

static bool kept_in_pcid(enum mode mode) {
    switch_to(PCID);
    return reads(mode, KEPT);
}

/* Kept where there is a level of the TLB for it; without one, a change of the identifier flushes. */
static bool kept_if_two_levels(enum mode mode) {
    return kept_in_pcid(mode) == !told("one-level");
}

/* What one identifier has is there when it returns, and invalidated meanwhile if that is asked for. */
static void check_several(enum mode mode) {
    uint64_t address = address_of(PAGE_USED);
    leave_translation(mode);
    check(reads(mode, CHANGED), "another identifier does not have the translation");
    check(kept_if_two_levels(mode), "it is kept while another identifier is used");

    leave_translation(mode);
    write_cr3(root_of(PRIMARY) | PCID_OTHER);
    check(kept_if_two_levels(mode), "CR3 without bit 63 flushes the identifier that it names alone");
    switch_to(PCID_OTHER);
    write_cr3(root_of(PRIMARY) | PCID);
    check(reads(mode, CHANGED), "and what that had before");

    leave_translation(mode);
    check(invpcid(0, PCID, address_of(PAGE_OTHER)) == 0 && kept_if_two_levels(mode),
          "INVPCID of another address, while another identifier is used");
    leave_translation(mode);
    check(invpcid(0, PCID, address) == 0 && !kept_in_pcid(mode),
          "INVPCID of an address, while another identifier is used");
    leave_translation(mode);
    check(invpcid(1, PCID_OTHER, 0) == 0 && kept_if_two_levels(mode),
          "INVPCID of the identifier that is used");
    leave_translation(mode);
    check(invpcid(1, PCID, 0) == 0 && !kept_in_pcid(mode), "INVPCID of one that is not");
    for (uint64_t type = 2; type < 4; type++) {
        leave_translation(mode);
        check(invpcid(type, 0, 0) == 0 && !kept_in_pcid(mode), "INVPCID of all, of which one is used");
    }
    leave_translation(mode);
    write_cr4(read_cr4() ^ CR4_SMEP);
    write_cr4(read_cr4() ^ CR4_SMEP);
    check(!kept_in_pcid(mode), "CR4 flushes all identifiers");
}

static void check_invpcid_rules(void) {
    const struct invpcid_descriptor descriptor = {0, 0};
    check(invpcid(4, 0, 0) == PROTECTION, "#GP: INVPCID of type 4");
    check(invpcid(1UL << 32, 0, 0) == PROTECTION, "#GP: INVPCID of a type of more than 32 bits");
    check(invpcid(1, 0x1000, 0) == PROTECTION, "#GP: INVPCID of an identifier of more than 12 bits");
    check(invpcid(0, PCID, NOT_CANONICAL) == PROTECTION, "#GP: INVPCID of an address that is not canonical");
    check(attempt(in_user_page(user_invpcid), 2, address_of(PAGE_USED), IN_USER) == PROTECTION,
          "#GP: INVPCID in user mode");
    map(0);
    check(faulted(attempt(do_invpcid, 2, address_of(PAGE_USED), IN_KERNEL), 0),
          "#PF: INVPCID without descriptor");
    write_cr3(root_of(PRIMARY));
    write_cr4(read_cr4() & ~CR4_PCIDE);
    check(invpcid(1, 1, 0) == PROTECTION && invpcid(0, 1, 0) == PROTECTION, "#GP: INVPCID 1 without PCIDE");
    check(attempt(do_invpcid, 1, (uintptr_t)&descriptor, IN_KERNEL) == 0, "INVPCID 0 without PCIDE");
    for (uint64_t type = 0; type < 4; type++) {
        cache_and_change(IN_USER);
        check(invpcid(type, 0, address_of(PAGE_USED)) == 0 && reads(IN_USER, CHANGED),
              "INVPCID without PCIDE");
    }
    write_cr4(read_cr4() | CR4_PCIDE);
}

static bool has_tlbins(void) {
    uint32_t registers[4];
    cpuid(0x40000000, 0, registers);
    if (registers[1] != 0x54474354 || registers[2] != 0x43544743 || registers[3] != 0x47435447)
        return false;
    cpuid(0x40000001, 0, registers);
    return registers[0] & 1;
}

static uint64_t insert(uint64_t flags) {
    return attempt(tlbins, address_of(PAGE_USED) + 8, frame(0) | flags, IN_KERNEL);
}

static void check_no_tlbins(void) {
    check(!has_tlbins(), "CPUID has no TLBINS");
    map(0);
    check(insert(OPEN) == INVALID_OPCODE, "#UD: no TLBINS");
    check(attempt(in_user_page(user_tlbins), address_of(PAGE_USED), frame(0) | OPEN, IN_USER) ==
              INVALID_OPCODE,
          "#UD: no TLBINS in user mode");
    check(faulted(read_as(IN_USER, PAGE_USED), FAULT_USER), "#PF: and nothing inserted");
}

static void check_tlbins(void) {
    check(has_tlbins(), "CPUID has TLBINS");
    uint64_t root = root_of(PRIMARY);
    for (unsigned i = 0; i < 2; i++) {
        enum mode first = both_modes[i], second = both_modes[!i];
        map(0);
        check(insert(OPEN) == 0, "TLBINS of a page that the page table has not");
        check(reads(first, KEPT) && reads(second, KEPT), "it is read");
        check(!write_as(first, PAGE_USED, KEPT) && !write_as(second, PAGE_USED, KEPT), "and written");
        check(*entry() == 0, "the page table has nothing still");
        write_cr3(root | PCID | CR3_NOFLUSH);
        check(reads(first, KEPT), "CR3 with bit 63 keeps what was inserted");
        invalidate(address_of(PAGE_USED));
        check(read_as(first, PAGE_USED) == PAGE_FAULT && read_as(second, PAGE_USED) == PAGE_FAULT,
              "INVLPG removes it");
        check(insert(OPEN) == 0 && reads(first, KEPT), "TLBINS once more");
        write_cr3(root | PCID);
        check(read_as(first, PAGE_USED) == PAGE_FAULT, "CR3 without bit 63 removes it");
        check(insert(OPEN) == 0 && !invpcid(0, PCID, address_of(PAGE_USED)) &&
                  read_as(first, PAGE_USED) == PAGE_FAULT,
              "INVPCID removes it");

        map(OPEN);
        check(insert(OPEN) == 0 && reads(first, KEPT) && reads(second, KEPT),
              "TLBINS of what the page table has");
        check(!write_as(first, PAGE_USED, KEPT) && *entry() == (frame(0) | OPEN), "its flags stay clear");
        map(OPEN & ~DIRTY);
        check(insert(OPEN & ~DIRTY) == 0 && reads(first, KEPT) && !flag(ACCESSED), "TLBINS of a clean page");
        check(!write_as(second, PAGE_USED, KEPT) && flag(ACCESSED) && flag(DIRTY), "its first write walks");
    }

    map(PRESENT | USER | DIRTY);
    check(insert(PRESENT | USER | DIRTY) == 0 && reads(IN_USER, KEPT), "TLBINS of a read-only page");
    check(faulted(write_as(IN_USER, PAGE_USED, KEPT), FAULT_PRESENT | FAULT_WRITE | FAULT_USER),
          "#PF: it is written");
    map(PRESENT | WRITABLE | DIRTY);
    check(insert(PRESENT | WRITABLE | DIRTY) == 0 && reads(IN_KERNEL, KEPT),
          "TLBINS of a page of the kernel");
    check(!attempt(kernel_read, address_of(PAGE_USED), 0, IN_KERNEL) && !flag(ACCESSED),
          "it is read without AC");
    check(faulted(read_as(IN_USER, PAGE_USED), FAULT_PRESENT | FAULT_USER), "#PF: user mode reads it");
    map(OPEN | NO_EXECUTE);
    *frame_of(0) = INTERRUPT_BYTES;
    check(insert(OPEN | NO_EXECUTE) == 0 && reads(IN_USER, INTERRUPT_BYTES), "TLBINS with no-execute");
    check(faulted(execute_as(IN_USER, PAGE_USED), FAULT_PRESENT | FAULT_USER | FAULT_FETCH),
          "#PF: it is executed");
    map(0);
    *frame_of(0) = INTERRUPT_BYTES;
    check(insert(OPEN) == 0 && execute_as(IN_USER, PAGE_USED) == 0, "TLBINS of a page that is executed");
    check(execute_as(IN_KERNEL, PAGE_USED) == PAGE_FAULT, "#PF: the kernel executes it");
    map(OPEN);
    check(insert(OPEN) == 0 &&
              faulted(attempt(kernel_read, address_of(PAGE_USED), 0, IN_KERNEL), FAULT_PRESENT),
          "#PF: the kernel reads it without AC");

    map(0);
    uint64_t address = address_of(PAGE_USED), open = frame(0) | OPEN;
    check(attempt(tlbins_far, address, open, IN_KERNEL) == 0 && reads(IN_USER, KEPT),
          "TLBINS with a displacement");
    map(0);
    write_msr(MSR_FS_BASE, 0x1000);
    check(attempt(tlbins_fs, address - 0x1000, open, IN_KERNEL) == 0 && reads(IN_USER, KEPT),
          "TLBINS with FS");

    map(0);
    check(insert(OPEN & ~PRESENT) == PROTECTION, "#GP: TLBINS of an entry that is not present");
    check(insert(OPEN | UNUSED_ADDRESS_BIT) == PROTECTION, "#GP: TLBINS with a reserved bit");
    check(attempt(tlbins, NOT_CANONICAL, open, IN_KERNEL) == PROTECTION,
          "#GP: TLBINS at no canonical address");
    check(attempt(in_user_page(user_tlbins), address, open, IN_USER) == PROTECTION,
          "#GP: TLBINS in user mode");
    operation *const undefined[] = {tlbins_register, tlbins_other_reg, tlbins_66,
                                    tlbins_f2,       tlbins_f3,        tlbins_lock};
    for (unsigned i = 0; i < sizeof undefined / sizeof *undefined; i++)
        check(attempt(undefined[i], address, open, IN_KERNEL) == INVALID_OPCODE,
              "#UD: what is no form of TLBINS");
    check(read_as(IN_KERNEL, PAGE_USED) == PAGE_FAULT, "nothing was inserted by what faulted");
}

/* The second CPU's part. It reads the page, or writes it, again and again by new walks. */
enum { ALIVE = 1, DEAD = 2, ROUNDS = 300000, LEAST_OF_EACH = 100 };
/* Two frames whose entries differ in their upper halves alone: 4 GiB apart. */
#define LOW_FRAME  0x2000000UL
#define HIGH_FRAME (LOW_FRAME + (1UL << 32))

static volatile uint64_t asked, answered, dead_reads, lost_flags, seen;
static volatile bool stop;

static void enter_as_second(void) {
    write_cr3(root_of(PRIMARY));
    write_cr4(read_cr4() | CR4_PCIDE);
    write_cr3(root_of(PRIMARY) | PCID);
    __asm__ volatile("stac" : : : "cc");
}

static uint64_t read_now(void) {
    return *(volatile uint64_t *)address_of(PAGE_USED);
}

static void read_once(void) {
    enter_as_second();
    seen = read_now();
}

static void read_on(void) {
    enter_as_second();
    while (!stop) {
        invalidate(address_of(PAGE_USED));
        if (read_now() == DEAD)
            dead_reads++;
        if (answered != asked) {
            invalidate(address_of(PAGE_USED));
            answered = asked;
        }
    }
}

static void write_on(void) {
    enter_as_second();
    while (!stop) {
        clear(DIRTY);
        invalidate(address_of(PAGE_USED));
        *(volatile uint64_t *)address_of(PAGE_USED) = seen + 1;
        if (!flag(DIRTY))
            lost_flags++;
        seen++;
    }
}

static void check_other_cpu(void) {
    insert_by_secondary(OPEN);
    check(reads(IN_USER, KEPT) && !flag(ACCESSED), "the first CPU has a page to itself");
    give_job(read_once);
    wait_for_job();
    check(seen == KEPT && flag(ACCESSED), "the second CPU's walk sets the flag");
}

/* Whoever finds the flag clear in an entry that he takes away knows that nobody has the translation. */
static void check_walks_are_atomic(uint64_t first, uint64_t second) {
    uint64_t places[] = {first, second}, used = 0, unused = 0;
    stop = false;
    *(volatile uint64_t *)first = ALIVE;
    *(volatile uint64_t *)second = DEAD;
    map(0);
    *entry() = first | OPEN;
    give_job(read_on);
    for (unsigned round = 1; round < ROUNDS || used < LEAST_OF_EACH || unused < LEAST_OF_EACH; round++) {
        volatile uint64_t *next = (volatile uint64_t *)places[round % 2],
                          *last = (volatile uint64_t *)places[!(round % 2)];
        *next = ALIVE;
        uint64_t old = __atomic_exchange_n(entry(), (uintptr_t)next | OPEN, __ATOMIC_SEQ_CST);
        if (old & ACCESSED) {
            used++;
            asked++;
            while (answered != asked)
                __asm__ volatile("pause");
        } else {
            unused++;
        }
        *last = DEAD;
        for (volatile unsigned wait = round % 64; wait; wait--)
            ;
    }
    stop = true;
    wait_for_job();
    check(dead_reads == 0, "no translation is left where the flag was clear");
}

static void check_flags_are_not_lost(void) {
    stop = false;
    seen = 0;
    map(OPEN);
    give_job(write_on);
    while (seen < ROUNDS)
        clear(ACCESSED);
    stop = true;
    wait_for_job();
    check(lost_flags == 0, "a flag is not lost where another is cleared");
}

void run_checks(void) {
    check_pcid_rules();
    for (unsigned i = 0; i < 2; i++) {
        check_noflush(both_modes[i]);
        check_invpcid(both_modes[i]);
        check_several(both_modes[i]);
    }
    check_insertion();
    check_sharing();
    check_protection();
    check_keys();
    check_invpcid_rules();
    if (told("tlbins"))
        check_tlbins();
    else
        check_no_tlbins();
    check_other_cpu();
    check_walks_are_atomic(frame(2), frame(3));
    check_walks_are_atomic(LOW_FRAME, HIGH_FRAME);
    check_flags_are_not_lost();
    print_number(checked);
    print(" checks, ");
    print_number(failed);
    print(" failed\n");
    leave(!failed);
}
