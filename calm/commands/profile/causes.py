"""The cause of an event of the kernel, by the names of the kernel's functions on the stack."""

from __future__ import annotations

import re
from collections.abc import Iterable

from calm.core.profile_model import CAUSES

# The compiler's marks on copies of a function, and the names of system calls' entries by architecture.
_MARK = re.compile(r"\.(constprop|isra|part|cold|llvm|lto_priv)\b.*$")
_ENTRY = re.compile(r"^__(?:x64|ia32|arm64|riscv|s390x?|se|do)_(?:compat_)?sys_(\w+)$")


def _table(text: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """A cause, a colon and functions in each paragraph."""
    rows = (paragraph.partition(":") for paragraph in text.split(";"))
    return tuple((cause.strip(), frozenset(functions.split())) for cause, _, functions in rows)


# The first row decides that has a function on the stack, so particular causes stand above general ones: a
# purge that must split a huge page is one of huge pages, and reclaim within a fault is reclaim. Paging out
# that the program asks for is madvise, although it runs reclaim's code.
_RULES = _table("""
ksm: ksm_scan_thread ksm_do_scan cmp_and_merge_page try_to_merge_one_page unmerge_ksm_pages;
compaction: compact_zone compact_zone_order try_to_compact_pages compact_node kcompactd;
numa: task_numa_work change_prot_numa do_numa_page do_huge_pmd_numa_page migrate_misplaced_page
    migrate_misplaced_folio;
collapse: collapse_huge_page khugepaged hpage_collapse_scan_pmd khugepaged_scan_mm_slot madvise_collapse
    collapse_pte_mapped_thp collapse_file retract_page_tables __split_huge_pmd __split_huge_pmd_locked
    split_huge_pmd_address split_huge_page_to_list split_huge_page_to_list_to_order __folio_split
    split_huge_pages_all deferred_split_scan;
madvise: madvise_cold_or_pageout_pte_range madvise_pageout;
reclaim: shrink_folio_list shrink_page_list shrink_inactive_list shrink_active_list shrink_lruvec shrink_node
    evict_folios try_to_shrink_lruvec try_to_free_pages try_to_free_mem_cgroup_pages balance_pgdat kswapd
    reclaim_high mem_cgroup_handle_over_high folio_referenced;
migration: migrate_pages migrate_pages_batch do_migrate_pages do_pages_move kernel_move_pages try_to_migrate
    migrate_folio_unmap do_mbind kernel_mbind;
cow: wp_page_copy do_wp_page wp_page_reuse wp_page_shared do_cow_fault do_huge_pmd_wp_page hugetlb_wp
    hugetlb_cow;
fork: dup_mmap dup_mm copy_mm copy_page_range;
exit: exit_mmap __mmput mmput exec_mmap begin_new_exec setup_arg_pages shift_arg_pages;
process_madvise: process_madvise vector_madvise;
mremap: move_page_tables move_vma mremap_to do_mremap;
madvise: do_madvise madvise_walk_vmas madvise_vma_behavior madvise_do_behavior;
brk: do_brk_flags;
munmap: __vm_munmap vm_munmap ksys_shmdt;
mprotect: do_mprotect_pkey mprotect_fixup change_protection;
mmap: vm_mmap_pgoff ksys_mmap_pgoff do_mmap;
msync: msync_interval
""")
# Then the system call decides,
_CALLS = _table("""
madvise: madvise; process_madvise: process_madvise; munmap: munmap shmdt; mprotect: mprotect pkey_mprotect;
brk: brk; mremap: mremap; mmap: mmap mmap_pgoff; msync: msync; membarrier: membarrier;
migration: move_pages mbind migrate_pages
""")
# and then the functions that any system call may run. Writing back makes pages read-only first.
_GENERAL = _table("""
munmap: do_munmap do_vmi_munmap __do_munmap;
msync: folio_mkclean page_mkclean folio_clear_dirty_for_io vfs_fsync_range;
membarrier: membarrier_private_expedited membarrier_global_expedited ipi_mb;
fault: handle_mm_fault __handle_mm_fault do_user_addr_fault exc_page_fault asm_exc_page_fault
    do_anonymous_page do_page_fault do_mem_abort do_translation_fault faultin_page __get_user_pages
""")
_HANDLED = {"flush_tlb_func", "do_flush_tlb_all", "do_kernel_range_flush", "__flush_smp_call_function_queue"}
_INTERRUPTED = {"sysvec_call_function", "asm_sysvec_call_function", "__sysvec_call_function", "ipi_handler"}

assert {cause for cause, _ in (*_RULES, *_CALLS, *_GENERAL)} <= set(CAUSES)


def plain(function: str) -> str:
    """A kernel function's name without the compiler's marks."""
    return _MARK.sub("", function)


def classify(functions: Iterable[str]) -> str:
    """The key of CAUSES for a stack of kernel functions; "other" if none of them is known."""
    names = {plain(function) for function in functions}
    # The interrupted code is on the stack as well, and has nothing to do with the interrupt.
    if names & _INTERRUPTED and names & _HANDLED:
        return "interrupt"
    called = {match[1] for name in names if (match := _ENTRY.match(name))}
    for table, present in ((_RULES, names), (_CALLS, called), (_GENERAL, names)):
        for cause, known in table:
            if present & known:
                return cause
    return "exit" if called & {"execve", "execveat"} and "exec_binprm" in names else "other"
