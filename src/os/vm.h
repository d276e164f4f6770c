/*
 * Virtual memory: address space is reserved first and committed as it is needed.
 *
 * Reserved memory has no access rights, so that neither strict overcommit charges it nor mlockall populates
 * it. Core files contain committed memory only. A range that is committed from its front (address_range.h)
 * stays one mapping, of which a process may have 65,530 only.
 *
 * Bases are page-aligned; sizes are in bytes and are rounded up to pages. Thread-safe unless said otherwise;
 * preserves errno; allocates nothing. All of it is system calls.
 */
#ifndef CALM_OS_VM_H
#define CALM_OS_VM_H

#include "base/size.h"

#include <stdbool.h>
#include <stddef.h>

/* In bytes: of the kernel that runs, not of the one that the library was built on. No system call. */
size_t vm_page_size(void);

static inline size_t vm_round_up(size_t bytes) {
    return size_round_up(bytes, vm_page_size());
}

/* Reserves bytes between two pages that are never accessible. NULL if there is no room. */
void *vm_reserve(size_t bytes);

/* Makes reserved pages readable and writable. False if memory is short. */
bool vm_commit(void *base, size_t bytes);

/* The same for what follows the committed front of a reserved range: without a further mapping, as long as
 * the front's end is neither a huge-page region nor moved pages. */
bool vm_commit_next(void *base, size_t bytes);

/* Makes committed pages, which hold nothing, reserved ones again. False, and nothing changed, if mappings are
 * short. */
bool vm_decommit(void *base, size_t bytes);

/* Both: committed memory of zeros, or NULL. */
void *vm_map(size_t bytes);

/* Committed memory of zeros that children of fork share; or NULL. Never released. */
void *vm_map_shared(size_t bytes);

/* All of what vm_reserve or vm_map returned; or a part that lies between two reserved pages, and these. */
void vm_release(void *base, size_t bytes);

/* Makes reserved pages readable, as zeros, at no cost in memory. */
void vm_make_readable(void *base, size_t bytes);

/* Makes committed pages resident and writable at once, as far as there is memory. False if the kernel cannot
 * (before Linux 5.14), or must not. */
bool vm_populate(void *base, size_t bytes);

/* Requests huge pages wherever they fit in the range. False if the kernel has none. Of a huge page that is
 * purged in part, the kernel may later bring in the whole again (khugepaged). */
bool vm_enable_huge_pages(void *base, size_t bytes);

/* The kernel makes no more huge pages in the range; existing ones stay. */
void vm_disable_huge_pages(void *base, size_t bytes);

/* Moves the pages of one committed range to another of the same size, whose content is lost; the first then
 * is zero. False, and nothing changed, if the kernel cannot. */
bool vm_move_pages(void *from, void *to, size_t bytes);

/* Replaces a range, moved pages included, by a new mapping of zeros that can merge with its neighbours, and
 * has none of the flags, locks, policies and access rights of before. */
bool vm_replace(void *base, size_t bytes);

/* The process has every new mapping locked in memory (mlockall) from now on, or none: vm_replace undoes that.
 */
void vm_note_locked_mappings(bool locked);

/* Makes inaccessible what is not mapped of a range, so that no other mapping can come there. */
void vm_fill_holes(void *base, size_t bytes);

enum vm_renewed {
    VM_RENEWED,  /* a new mapping, of zeros */
    VM_RESTORED, /* the old one, readable and writable, with its content, and as far as possible with the
                    flags of a new one */
    VM_UNUSABLE,
};

/* As vm_replace; where that is refused, undoes what a program may have done to the range. */
enum vm_renewed vm_renew(void *base, size_t bytes);

/* ---- the system's policies; what concerns huge pages is read from /sys, at the start ---- */

/* The size, in bytes, of the pages that a fault may bring in wherever one fits; 0 if the system does that on
 * request only, or never, or does not say. */
size_t huge_pages_always_bytes(void);

/* The size of the pages that a fault brings in where they were requested; 0 if requests have no effect. */
size_t huge_pages_request_bytes(void);

/* Whether the kernel would map this much at once, given its policy of overcommitment. */
bool vm_can_map(size_t bytes);

/* The limit on address space (RLIMIT_AS), SIZE_MAX if there is none. */
size_t vm_limit_bytes(void);

#endif
