/*
 * glibc's own malloc settings that the user (GLIBC_TUNABLES, MALLOC_..._) or the program (mallopt) has made.
 * They take precedence over the library's. Also here: glibc's dynamic mmap threshold, which the library keeps
 * going, as glibc itself ends it once its trim threshold is set.
 *
 * Thread-safe. Read by every module that decides something; a forked child keeps all of it.
 */
#ifndef PTLBMALLOC2_GLIBC_SETTINGS_H
#define PTLBMALLOC2_GLIBC_SETTINGS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

extern struct glibc_settings {
    _Atomic(bool) trim_threshold, top_pad, mmap_threshold; /* whether set; each ends the dynamic threshold */
    _Atomic(size_t) top_pad_bytes;                         /* if top_pad */
    _Atomic(size_t) mmap_threshold_bytes; /* as set, or as glibc's dynamic threshold would be; no less */
    bool huge_pages;                      /* heaps have other sizes */
    bool tagging;                         /* addresses of blocks carry tags */
    bool check;                           /* a mark follows each block */
} glibc_settings;

/* Reads the environment, at start-up. */
void glibc_settings_read(void);

/* Before mallopt(parameter, value). Once glibc has accepted an mmap threshold, the caller stores that. */
void glibc_settings_note(int parameter, size_t value);

/* An mmapped chunk of this size is about to be freed. Returns whether that raises the dynamic threshold. */
bool glibc_settings_raise_mmap_threshold(size_t chunk_bytes);

#endif
