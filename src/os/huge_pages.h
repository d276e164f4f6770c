/* Whether the system backs memory with huge pages: unasked, so that what is merely usable may become
 * resident, or where it is asked to. */
#ifndef CALM_OS_HUGE_PAGES_H
#define CALM_OS_HUGE_PAGES_H

#include <stddef.h>

/*
 * The size of the pages that a fault may bring in wherever one fits; 0 where the system does so only on
 * request, or never, or does not say. Reads /sys: for start-up. Preserves errno.
 */
size_t huge_page_always_bytes(void);

/* The size of the pages that a fault brings in where they were asked for; 0 where that does nothing. The same
 * holds. */
size_t huge_page_request_bytes(void);

#endif
