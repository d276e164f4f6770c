/*
 * Not part of the library: what only newer versions of glibc define, and the
 * library uses where it is there. The linker finds the names here, and so asks
 * for no version of them. At run time they are glibc's, or NULL. This stands in
 * the place of the dynamic linker's file, so one more name of that is here.
 */
const char __rseq_offset, __rseq_size, __libc_single_threaded, _dl_find_object;
const char _r_debug;
