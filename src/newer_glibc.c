/*
 * Not part of the library: what only newer versions of glibc define, and the
 * library uses where it is there. The linker finds the names here, and so asks
 * for no version of them. At run time they are glibc's, or NULL. This stands in
 * the place of the dynamic linker's file, so the names that code may need of
 * that are here, too.
 */
#pragma GCC visibility push(default)
const char __rseq_offset, __rseq_size, __libc_single_threaded, _dl_find_object;
const char _r_debug, __tls_get_addr, __stack_chk_guard;
