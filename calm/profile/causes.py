"""What made the kernel do it: judged by the names of the kernel's functions on the stack."""

import re
from collections.abc import Iterable, Mapping

from calm.profile.model import CAUSES

# The compiler's marks on copies of a function, and what a system call's entry is called by architecture.
_MARK = re.compile(r"\.(constprop|isra|part|cold|llvm|lto_priv)\b.*$")
_ENTRY = re.compile(r"^__(?:x64|ia32|arm64|riscv|s390x?|se|do)_(?:compat_)?sys_(\w+)$")

# The first row of which a function is on the stack decides, so the particular stands above the general: a
# purge that must split a huge page is of the huge page, reclaim within a fault is reclaim.
_RULES: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (cause, frozenset(names.split()))
    for cause, names in (
        ("ksm", "ksm_scan_thread ksm_do_scan cmp_and_merge_page try_to_merge_one_page unmerge_ksm_pages"),
        ("compaction", "compact_zone compact_zone_order try_to_compact_pages compact_node kcompactd"),
        (
            "numa",
            "task_numa_work change_prot_numa do_numa_page do_huge_pmd_numa_page migrate_misplaced_page "
            "migrate_misplaced_folio",
        ),
        (
            "collapse",
            "collapse_huge_page khugepaged hpage_collapse_scan_pmd khugepaged_scan_mm_slot madvise_collapse "
            "collapse_pte_mapped_thp collapse_file retract_page_tables __split_huge_pmd "
            "__split_huge_pmd_locked split_huge_pmd_address split_huge_page_to_list "
            "split_huge_page_to_list_to_order __folio_split split_huge_pages_all deferred_split_scan",
        ),
        # Paging out that the program asks for is its own doing, whatever code of reclaim's it runs.
        ("madvise", "madvise_cold_or_pageout_pte_range madvise_pageout"),
        (
            "reclaim",
            "shrink_folio_list shrink_page_list shrink_inactive_list shrink_active_list shrink_lruvec "
            "shrink_node evict_folios try_to_shrink_lruvec try_to_free_pages try_to_free_mem_cgroup_pages "
            "balance_pgdat kswapd reclaim_high mem_cgroup_handle_over_high folio_referenced",
        ),
        (
            "migration",
            "migrate_pages migrate_pages_batch do_migrate_pages do_pages_move kernel_move_pages "
            "try_to_migrate migrate_folio_unmap do_mbind kernel_mbind",
        ),
        (
            "cow",
            "wp_page_copy do_wp_page wp_page_reuse wp_page_shared do_cow_fault do_huge_pmd_wp_page "
            "hugetlb_wp hugetlb_cow",
        ),
        ("fork", "dup_mmap dup_mm copy_mm copy_page_range"),
        ("exit", "exit_mmap __mmput mmput exec_mmap begin_new_exec setup_arg_pages shift_arg_pages"),
        ("process_madvise", "process_madvise vector_madvise"),
        ("mremap", "move_page_tables move_vma mremap_to do_mremap"),
        ("madvise", "do_madvise madvise_walk_vmas madvise_vma_behavior madvise_do_behavior"),
        ("brk", "do_brk_flags"),
        ("munmap", "__vm_munmap vm_munmap ksys_shmdt"),
        ("mprotect", "do_mprotect_pkey mprotect_fixup change_protection"),
        ("mmap", "vm_mmap_pgoff ksys_mmap_pgoff do_mmap"),
        ("msync", "msync_interval"),
    )
)

# By the call's own name; below all rules above, and above what a call may fault on.
_CALLS: Mapping[str, str] = {
    **{name: name for name in ("madvise", "process_madvise", "munmap", "mprotect", "brk", "mremap")},
    **{name: name for name in ("mmap", "msync", "membarrier")},
    "pkey_mprotect": "mprotect",
    "shmdt": "munmap",
    "mmap_pgoff": "mmap",
    "move_pages": "migration",
    "mbind": "migration",
    "migrate_pages": "migration",
}

# What a system call's own name goes before.
_LATER: tuple[tuple[str, frozenset[str]], ...] = (
    ("munmap", frozenset(("do_munmap", "do_vmi_munmap", "__do_munmap"))),
    # Writing back makes pages read-only first.
    ("msync", frozenset(("folio_mkclean", "page_mkclean", "folio_clear_dirty_for_io", "vfs_fsync_range"))),
    ("membarrier", frozenset(("membarrier_private_expedited", "membarrier_global_expedited", "ipi_mb"))),
    (
        "fault",
        frozenset(
            (
                *("handle_mm_fault", "__handle_mm_fault", "do_user_addr_fault", "exc_page_fault"),
                *("asm_exc_page_fault", "do_anonymous_page", "do_page_fault", "do_mem_abort"),
                *("do_translation_fault", "faultin_page", "__get_user_pages"),
            )
        ),
    ),
)

_HANDLED = frozenset(
    ("flush_tlb_func", "do_flush_tlb_all", "do_kernel_range_flush", "__flush_smp_call_function_queue")
)
_INTERRUPTED = frozenset(
    ("sysvec_call_function", "asm_sysvec_call_function", "__sysvec_call_function", "ipi_handler")
)


def plain(function: str) -> str:
    """A kernel function's name without the compiler's marks."""
    return _MARK.sub("", function)


def classify(functions: Iterable[str]) -> str:
    """The key of CAUSES that a stack of kernel functions speaks for; "other" where none does."""
    names = {plain(function) for function in functions}
    # Whatever was interrupted stands on the stack as well, and has nothing to do with it.
    if names & _INTERRUPTED and names & _HANDLED:
        return "interrupt"
    for cause, known in _RULES:
        if names & known:
            return cause
    called = {match[1] for name in names if (match := _ENTRY.match(name))}
    for call, cause in _CALLS.items():
        if call in called:
            return cause
    for cause, known in _LATER:
        if names & known:
            return cause
    return "exit" if called & {"execve", "execveat"} and "exec_binprm" in names else "other"


assert {cause for cause, _ in (*_RULES, *_LATER)} | set(_CALLS.values()) <= set(CAUSES)
