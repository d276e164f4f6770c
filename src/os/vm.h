/*
 * Virtual memory. Address space is reserved first, and committed when it is
 * needed.
 *
 * Reserved memory has no access rights, so strict overcommit does not charge it
 * and mlockall does not populate it. Core files contain only committed memory.
 * A range that is committed from its front (address_range.h) stays one mapping.
 * A process may have only 65,530 mappings.
 *
 * Bases are page-aligned. Sizes are in bytes, and are rounded up to pages.
 * Unless noted otherwise, the functions are thread-safe, make system calls,
 * preserve errno, and allocate nothing.
 */
#ifndef CALM_OS_VM_H
#define CALM_OS_VM_H

#include "base/size.h"

#include <stdbool.h>
#include <stddef.h>

/* Returns the page size of the running kernel, in bytes. Makes no system
 * call. */
size_t vm_page_size(void);

static inline size_t vm_round_up(size_t bytes) {
    return size_round_up(bytes, vm_page_size());
}

/* Reserves address space between two guard pages. Returns NULL if there is no
 * room. */
void *vm_reserve(size_t bytes);

/* Makes reserved pages readable and writable. Returns false if memory is
 * short. */
bool vm_commit(void *base, size_t bytes);

/* Commits the pages behind the committed front of a reserved range. This adds
 * no mapping, unless the front ends in a huge-page region or in moved pages.
 * Returns false if memory is short. */
bool vm_commit_next(void *base, size_t bytes);

/* Turns committed pages without content into reserved pages. If the process has
 * too many mappings, returns false and changes nothing. */
bool vm_decommit(void *base, size_t bytes);

/* Reserves and commits memory. Returns its address, or NULL. The memory reads
 * as zeros. */
void *vm_map(size_t bytes);

/* Returns committed memory of zeros that children of fork share, or NULL. The
 * memory is never released. */
void *vm_map_shared(size_t bytes);

/* Releases a whole range that vm_reserve or vm_map returned. Alternatively
 * releases a part of it that lies between two reserved pages, and these two
 * pages. */
void vm_release(void *base, size_t bytes);

/* Makes reserved pages readable. They read as zeros and take no memory. */
void vm_make_readable(void *base, size_t bytes);

/* Makes committed pages resident and writable in one call, as far as there is
 * memory. Returns false if the kernel does not support the call (before Linux
 * 5.14), or refuses it. */
bool vm_prefault(void *base, size_t bytes);

/* Requests huge pages wherever they fit in the range. Returns false if the
 * kernel has none. If a part of a huge page is purged, the kernel may later
 * make all of it resident again (khugepaged). */
bool vm_enable_huge_pages(void *base, size_t bytes);

/* Makes the kernel create no more huge pages in the range. Existing huge pages
 * stay. */
void vm_disable_huge_pages(void *base, size_t bytes);

/* Moves the pages of one committed range to another range of equal size, whose
 * content is lost. The first range is zero afterwards. If the kernel refuses,
 * returns false and changes nothing. */
bool vm_move_pages(void *from, void *to, size_t bytes);

/* Replaces a range, including moved pages, by a new mapping of zeros, which can
 * merge with its neighbours. The new mapping has none of the old one's flags,
 * locks, policies and access rights. */
bool vm_replace(void *base, size_t bytes);

/* Returns whether it can merge. Not if the neighbours have the library's name,
 * and a filter that the program added forbids the call that gives a name. */
bool vm_can_merge_replaced(void);

/* Notes whether mlockall locks new mappings of the process from now on.
 * vm_replace unlocks them. */
void vm_note_locked_mappings(bool locked);
bool vm_locks_mappings(void);

/* Makes the unmapped parts of a range inaccessible, so that no other mapping
 * can take their place. */
void vm_fill_holes(void *base, size_t bytes);

enum vm_renewed {
    VM_RENEWED,  /* the range is a new mapping of zeros */
    VM_RESTORED, /* the old mapping, readable and writable, with its content, and as far as possible with the
                    flags of a new one */
    VM_UNUSABLE,
};

/* Replaces a range like vm_replace. If the kernel refuses, undoes the changes
 * that a program may have made to the range. */
enum vm_renewed vm_renew(void *base, size_t bytes);

/* ---- the system's policies; the setting for huge pages is read from /sys, at the start ---- */

/* Returns the size, in bytes, of the huge pages that any fault may bring in.
 * Returns 0 if the system brings them in only on request, or never, or if its
 * setting is not known. */
size_t huge_pages_always_bytes(void);

/* Returns the size, in bytes, of the huge pages that a fault may bring in where
 * huge pages were requested. Returns 0 if requests have no effect. */
size_t huge_pages_request_bytes(void);

/* Returns whether the kernel, by its policy of overcommitment, would map this
 * number of bytes in one piece. */
bool vm_can_map(size_t bytes);

/* Returns the limit on address space (RLIMIT_AS), or SIZE_MAX if there is
 * none. */
size_t vm_limit_bytes(void);

#endif
