/*
 * marks: what a program does to pages of its own blocks by system calls does not concern the next owner of
 * the memory. Each kind of mark is set on blocks of several sizes, which are freed, or resized first; then
 * others take the memory, and find it readable, writable, inherited by children, and with the kernel's flags
 * of memory that never was marked.
 */
#include "api.h"
#include "names.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <linux/userfaultfd.h>
#include <malloc.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif
#ifndef PR_SET_VMA
#define PR_SET_VMA           0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define PAGE        ((size_t)sysconf(_SC_PAGESIZE))
#define SMALL_BYTES ((size_t)4000)

/* ---- the marks: 0, or an errno ---- */

static int result_of(long result) {
    return result < 0 ? errno : 0;
}

#define ADVICE(name, advice)                             \
    static int name(char *start, size_t bytes) {         \
        return result_of(madvise(start, bytes, advice)); \
    }
#define RIGHTS(name, rights)                              \
    static int name(char *start, size_t bytes) {          \
        return result_of(mprotect(start, bytes, rights)); \
    }

ADVICE(dont_fork, MADV_DONTFORK)
ADVICE(wipe_on_fork, MADV_WIPEONFORK)
ADVICE(dont_dump, MADV_DONTDUMP)
ADVICE(mergeable, MADV_MERGEABLE)
ADVICE(no_huge_pages, MADV_NOHUGEPAGE)
ADVICE(guard, MADV_GUARD_INSTALL)
RIGHTS(read_only, PROT_READ)
RIGHTS(no_access, PROT_NONE)
RIGHTS(executable, PROT_READ | PROT_WRITE | PROT_EXEC)

static int posix_random(char *start, size_t bytes) {
    return posix_madvise(start, bytes, POSIX_MADV_RANDOM);
}

static int raw_dont_fork(char *start, size_t bytes) {
    return result_of(syscall(SYS_madvise, start, bytes, MADV_DONTFORK));
}

static int lock(char *start, size_t bytes) {
    return result_of(mlock(start, bytes));
}

static int lock_on_fault(char *start, size_t bytes) {
    return result_of(mlock2(start, bytes, MLOCK_ONFAULT));
}

static int key(char *start, size_t bytes) {
    int number = pkey_alloc(0, 0);
    return number < 0 ? errno : result_of(pkey_mprotect(start, bytes, PROT_READ | PROT_WRITE, number));
}

static int bind_node(char *start, size_t bytes) {
    unsigned long nodes = 1;
    return result_of(syscall(SYS_mbind, start, bytes, MPOL_BIND, &nodes, 8 * sizeof nodes, 0));
}

static int name_range(char *start, size_t bytes) {
    return result_of(prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, start, bytes, "a name"));
}

static int user_faults(char *start, size_t bytes) {
    int descriptor = (int)syscall(SYS_userfaultfd, UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.range = {(uintptr_t)start, bytes}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    return descriptor < 0 || ioctl(descriptor, UFFDIO_API, &api) != 0 ||
                   ioctl(descriptor, UFFDIO_REGISTER, &range) != 0
               ? errno
               : 0;
}

static const struct kind {
    const char *name;
    int (*set)(char *start, size_t bytes);
    bool readable; /* so that a block may be copied */
} kinds[] = {
    {"dont-fork", dont_fork, true},
    {"wipe-on-fork", wipe_on_fork, true},
    {"dont-dump", dont_dump, true},
    {"mergeable", mergeable, true},
    {"no-huge-pages", no_huge_pages, true},
    {"guard", guard, false},
    {"read-only", read_only, true},
    {"no-access", no_access, false},
    {"executable", executable, true},
    {"random", posix_random, true},
    {"raw-dont-fork", raw_dont_fork, true},
    {"lock", lock, true},
    {"lock-on-fault", lock_on_fault, true},
    {"key", key, true},
    {"bind", bind_node, true},
    {"name", name_range, true},
    {"user-faults", user_faults, true},
};

/* ---- what the kernel says of memory ---- */

/* Flags and lines of /proc/self/smaps that a mark sets, of the mapping at an address. */
static size_t describe(const void *address, char *text, size_t bytes) {
    static const char *const flags[] = {"ex", "lo", "lf", "dc", "dd", "wf", "mg",
                                        "nh", "rr", "sr", "um", "uw", "ui", "sl"};
    FILE *file = fopen("/proc/self/smaps", "r");
    CHECK(file != NULL);
    char line[4096];
    size_t length = 0;
    bool here = false;
    while (fgets(line, sizeof line, file) != NULL) {
        uintptr_t start, end;
        char rights[8], rest[256] = "";
        if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %255[^\n]", &start, &end, rights, rest) >= 3) {
            here = start <= (uintptr_t)address && (uintptr_t)address < end;
            const char *name = strstr(rest, "[anon:") == NULL ? "" : rest;
            length += here ? (size_t)snprintf(text + length, bytes - length, "%s %s", rights, name) : 0;
        } else if (here && strncmp(line, "ProtectionKey:", 14) == 0) {
            length += (size_t)snprintf(text + length, bytes - length, " key %d", atoi(line + 14));
        } else if (here && strncmp(line, "VmFlags:", 8) == 0) {
            for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
                char word[8];
                snprintf(word, sizeof word, " %s ", flags[i]);
                length += strstr(line, word) == NULL
                              ? 0
                              : (size_t)snprintf(text + length, bytes - length, " %s", flags[i]);
            }
        }
    }
    fclose(file);
    int policy = MPOL_DEFAULT;
    if (syscall(SYS_get_mempolicy, &policy, NULL, 0, address, MPOL_F_ADDR) == 0 && policy != MPOL_DEFAULT) {
        length += (size_t)snprintf(text + length, bytes - length, " policy %d", policy);
    }
    return length;
}

static char clean[4096]; /* of memory that never was marked */

static void check_is_clean(const char *block, size_t bytes) {
    for (size_t at = 0; at < bytes; at += bytes / 3 + 1) {
        char text[4096] = "";
        describe(block + at, text, sizeof text);
        if (strcmp(text, clean) != 0) {
            fprintf(stderr, "byte %zu of %zu: %s; unmarked memory: %s\n", at, bytes, text, clean);
            exit(1);
        }
    }
}

/* ---- the cases ---- */

#define MAX_OWNERS 40000
static char *owners[MAX_OWNERS];

/* Blocks of one size, by one function, until they have been where the marked block was, or much is taken. */
static void check_owners(const char *was, size_t marked, size_t bytes, int how) {
    size_t count = 0;
    for (size_t all = 0; all < 2 * marked && count < MAX_OWNERS; all += bytes) {
        char *block = how == 0   ? malloc(bytes)
                      : how == 1 ? calloc(1, bytes)
                                 : aligned_alloc(16 * PAGE, bytes);
        CHECK(block != NULL);
        owners[count++] = block;
        if (block < was + marked && was < block + bytes && (bytes >= 64 * KIB || count % 1024 == 1)) {
            check_is_clean(block, bytes);
        }
    }
    for (size_t i = 0; i < count; i++) {
        CHECK(how != 1 || is_zero(owners[i], bytes));
        fill(owners[i], bytes, i);
    }
    int child = fork();
    if (child == 0) {
        for (size_t i = 0; i < count; i++) {
            CHECK(is_filled(owners[i], bytes, i));
        }
        _exit(0);
    }
    check_child(child);
    for (size_t i = 0; i < count; i++) {
        CHECK(is_filled(owners[i], bytes, i));
        free(owners[i]);
    }
}

static void set(const struct kind *kind, char *block, size_t bytes, bool whole) {
    char *start = (char *)(((uintptr_t)block + PAGE - 1) & -PAGE);
    char *end = (char *)((uintptr_t)(block + bytes) & -PAGE);
    size_t part = whole ? 0 : (size_t)(end - start) / 3 & -PAGE;
    int error = kind->set(start + part, (size_t)(end - start) - 2 * part);
    if (error != 0) {
        fprintf(stderr, "%s: %s\n", kind->name, strerror(error));
        exit(CANNOT);
    }
}

enum order { FREE, SHRINK, SHRINK_TO_SMALL, GROW, ORDERS };

static void check_kind(const struct kind *kind, size_t bytes, enum order order, bool whole, int how) {
    char *block = malloc(bytes);
    CHECK(block != NULL);
    fill(block, bytes, 7);
    set(kind, block, bytes, whole);
    uintptr_t was = (uintptr_t)block;
    size_t kept = order == SHRINK ? bytes / 4 : order == GROW ? bytes * 2 : SMALL_BYTES;
    if (order != FREE) {
        block = realloc(block, kept);
        CHECK(block != NULL);
    }
    free(block);
    check_owners((char *)was, bytes, how < 2 ? bytes : bytes & -(16 * PAGE), how);
    check_owners((char *)was, bytes, SMALL_BYTES, 0);
}

/* "kind size...": sizes in bytes. */
static void mark(const char *argument) {
    char name[64];
    size_t bytes;
    CHECK_EQUAL(sscanf(argument, "%63s %zu", name, &bytes), 2);
    char *plain = malloc(bytes);
    fill(plain, bytes, 1);
    describe(plain + bytes / 2, clean, sizeof clean);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        for (int order = 0; strcmp(kinds[i].name, name) == 0 && order < ORDERS; order++) {
            if (order == FREE || kinds[i].readable) {
                check_kind(&kinds[i], bytes, (enum order)order, true, order % 3);
                check_kind(&kinds[i], bytes, (enum order)order, false, (order + 1) % 3);
            }
        }
    }
    free(plain);
    say("marked", 1);
}

/* Huge pages that were requested for blocks, as numpy does for arrays. Says how many bytes of them appear and
 * are left: small pages may be there too, since an offload server with time to spare touches blocks ahead. */
#define ARRAYS      12
#define ARRAY_BYTES (16 * MIB)
#define BLOCKS      300
#define BLOCK_BYTES ((size_t)300000)

static void huge_pages(const char *argument) {
    (void)argument;
    static char *arrays[ARRAYS], *blocks[BLOCKS];
    for (size_t i = 0; i < ARRAYS; i++) {
        arrays[i] = malloc(ARRAY_BYTES);
        CHECK(arrays[i] != NULL);
        char *start = (char *)(((uintptr_t)arrays[i] + PAGE - 1) & -PAGE);
        CHECK(madvise(start, ARRAY_BYTES - PAGE, MADV_HUGEPAGE) == 0);
        fill(arrays[i], ARRAY_BYTES, i);
    }
    for (size_t i = 0; i < ARRAYS; i += 2) {
        free(arrays[i]);
    }
    malloc_trim(0);
    size_t before = rollup_bytes("AnonHugePages");
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(BLOCK_BYTES);
        CHECK(blocks[i] != NULL);
        blocks[i][BLOCK_BYTES / 2] = 1;
    }
    size_t after = rollup_bytes("AnonHugePages");
    say("grown", after < before ? 0 : after - before);
    for (size_t i = 1; i < ARRAYS; i += 2) {
        CHECK(is_filled(arrays[i], ARRAY_BYTES, i));
        free(arrays[i]);
    }
    malloc_trim(0);
    say("left", rollup_bytes("AnonHugePages"));
    for (size_t i = 0; i < BLOCKS; i++) {
        free(blocks[i]);
    }
    malloc_trim(0);
    say("end", resident_bytes());
}

/* All later mappings are locked, also those that the allocator makes anew. */
static void lock_future(const char *argument) {
    CHECK(argument != NULL);
    if (mlockall(MCL_FUTURE | (strcmp(argument, "on-fault") == 0 ? MCL_ONFAULT : 0)) != 0) {
        exit(CANNOT);
    }
    for (int round = 0; round < 3; round++) {
        char *block = malloc(MIB);
        for (size_t bytes = MIB; bytes <= 128 * MIB; bytes *= 2) {
            block = realloc(block, bytes);
            CHECK(block != NULL);
            memset(block + bytes / 2, round, bytes / 2);
        }
        free(block);
    }
    malloc_trim(0);
    say("locked", rollup_bytes("Locked"));
    say("left", resident_bytes());
}

/* What a child maps does not come where pages of a block are absent: it would be lost when the block is
 * freed. */
static void absent(const char *argument) {
    (void)argument;
    enum { PIECES = 64 };
    char *pieces[PIECES];
    char *block = malloc(64 * MIB);
    fill(block, 64 * MIB, 1);
    char *start = (char *)(((uintptr_t)block + PAGE - 1) & -PAGE);
    CHECK(madvise(start, 63 * MIB, MADV_DONTFORK) == 0);
    int child = fork();
    if (child == 0) {
        for (size_t i = 0; i < PIECES; i++) {
            pieces[i] = own_pages(MIB);
            CHECK(pieces[i] + MIB <= block || block + 64 * MIB <= pieces[i]);
            fill(pieces[i], MIB, i);
        }
        free(block);
        malloc_trim(0);
        fill(malloc(64 * MIB), 64 * MIB, 2);
        for (size_t i = 0; i < PIECES; i++) {
            CHECK(is_filled(pieces[i], MIB, i));
        }
        _exit(0);
    }
    check_child(child);
    CHECK(is_filled(block, 64 * MIB, 1));
    say("apart", 1);
}

/* ---- at random ---- */

enum child { COPIED, ABSENT, WIPED };

static struct slot {
    char *block;
    size_t bytes;
    uint64_t mark;
    enum child in_child;
    bool no_access, read_only;
} slots[150];

static uint64_t state;
/* glibc unmaps blocks of this size, and keeps the pages of smaller ones as they are: all of these together
 * are less, so that it maps each of the large ones. */
static bool only_mapped;
#define MAPPED_BYTES (33 * MIB)

static uint64_t below(uint64_t end) {
    return next_random(&state) % end;
}

static char *first_whole_page(const struct slot *slot) {
    return (char *)(((uintptr_t)slot->block + PAGE - 1) & -PAGE);
}

static size_t whole_pages(const struct slot *slot) {
    char *end = (char *)((uintptr_t)(slot->block + slot->bytes) & -PAGE);
    return end > first_whole_page(slot) ? (size_t)(end - first_whole_page(slot)) : 0;
}

static void check_slot(const struct slot *slot, bool in_child) {
    if (slot->block == NULL || slot->no_access || (in_child && slot->in_child == ABSENT)) {
        return;
    }
    CHECK(in_child && slot->in_child == WIPED ? is_zero(first_whole_page(slot), whole_pages(slot))
                                              : is_filled(slot->block, slot->bytes, slot->mark));
}

static void allocate_slot(struct slot *slot) {
    size_t bytes = below(2) != 0 ? 1 + below(4000)
                                 : 40 * KIB + below(below(8) == 0 && !only_mapped ? 6 * MIB : 200 * KIB);
    if (only_mapped && below(64) == 0) {
        bytes = MAPPED_BYTES + below(MIB);
    }
    bool zero = below(3) == 0;
    *slot = (struct slot){.bytes = bytes, .mark = next_random(&state)};
    slot->block = zero            ? calloc(1, bytes)
                  : below(4) == 0 ? aligned_alloc(4 * PAGE, bytes & -(4 * PAGE))
                                  : malloc(bytes);
    slot->bytes = malloc_usable_size(slot->block);
    slot->bytes = slot->bytes < bytes ? slot->bytes : bytes;
    CHECK(slot->block != NULL || bytes < 4 * PAGE);
    CHECK(!zero || is_zero(slot->block, slot->bytes));
    fill(slot->block, slot->bytes, slot->mark);
}

/* What the kernel refuses, as too many locked pages, marks nothing. */
static void mark_slot(struct slot *slot) {
    char *start = first_whole_page(slot);
    size_t bytes = whole_pages(slot);
    static const int hints[] = {MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_DONTDUMP, MADV_RANDOM, MADV_COLLAPSE};
    if (bytes == 0 || slot->bytes < 40 * KIB) {
        return;
    }
    switch (only_mapped && slot->bytes < MAPPED_BYTES ? 0 : below(8)) {
    case 1:
        slot->in_child = madvise(start, bytes, MADV_DONTFORK) == 0 ? ABSENT : slot->in_child;
        break;
    case 2:
        slot->in_child =
            slot->in_child == COPIED && madvise(start, bytes, MADV_WIPEONFORK) == 0 ? WIPED : slot->in_child;
        break;
    case 3:
        slot->no_access = mprotect(start, bytes, PROT_NONE) == 0;
        break;
    case 4:
        slot->read_only = mprotect(start, bytes, PROT_READ) == 0;
        slot->no_access = false;
        break;
    case 5:
        slot->no_access = slot->read_only = mprotect(start, bytes, PROT_READ | PROT_WRITE) != 0;
        break;
    case 6:
        mlock(start, bytes < MIB ? bytes : MIB);
        break;
    default:
        madvise(start, bytes, hints[below(sizeof hints / sizeof *hints)]);
    }
}

static void resize_slot(struct slot *slot) {
    if (slot->no_access || slot->read_only || slot->in_child != COPIED) {
        return; /* parts of it would be as they were marked, and others not */
    }
    size_t bytes = 1 + below(below(2) == 0 ? 4000 : only_mapped ? 200 * KIB : 2 * slot->bytes);
    slot->block = realloc(slot->block, bytes);
    CHECK(slot->block != NULL);
    slot->bytes = bytes;
    fill(slot->block, bytes, slot->mark);
}

static void check_all(void) {
    size_t count = sizeof slots / sizeof *slots;
    int child = fork();
    for (size_t i = 0; i < count; i++) {
        check_slot(&slots[i], child == 0);
    }
    if (child == 0) {
        /* First of all: where a block is absent, the kernel may map something else, which its free unmaps. */
        for (size_t i = 0; i < count; i++) {
            free(slots[i].block);
        }
        for (size_t i = 0; i < count; i++) {
            allocate_slot(&slots[i]);
        }
        for (size_t i = 0; i < count; i++) {
            check_slot(&slots[i], false);
        }
        _exit(0);
    }
    check_child(child);
}

/* "steps seed": in the state of the machine's huge pages as it is. */
static void at_random(const char *argument) {
    size_t steps;
    char which[16];
    CHECK_EQUAL(sscanf(argument, "%zu %lu %15s", &steps, &state, which), 3);
    only_mapped = strcmp(which, "mapped") == 0;
    for (size_t step = 0; step < steps; step++) {
        struct slot *slot = &slots[below(sizeof slots / sizeof *slots)];
        if (slot->block == NULL) {
            allocate_slot(slot);
            continue;
        }
        check_slot(slot, false);
        switch (below(8)) {
        case 0:
            resize_slot(slot);
            break;
        case 1:
        case 2:
        case 3:
            mark_slot(slot);
            break;
        default:
            free(slot->block);
            slot->block = NULL;
        }
        if (step % 100 == 99) {
            malloc_trim(below(2) * MIB);
        }
        if (step % 500 == 499) {
            check_all();
        }
    }
    say("steps", steps);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {{"mark", mark},
                                             {"huge-pages", huge_pages},
                                             {"lock-future", lock_future},
                                             {"absent", absent},
                                             {"at-random", at_random}};
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
